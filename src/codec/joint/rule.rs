//! Form and numbers of a replay, and the column that stores them. Spec: `spec/codecs/joint.md`, clause 3.

use tensorcask_kernels::gradient::Second;
use tensorcask_kernels::joint::Joint as Step;

use super::super::gradient;
use super::super::replay::rule::{put_step, read_step};
use super::super::residual::{COLUMNS_OF_MOMENT, COLUMNS_OF_STEP};
use crate::wire::Cursor;
use crate::{Error, Result};

/// Form and numbers of a replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Rule {
    Step(Step),
    Moment(Second),
}

/// Rule that a search found.
pub(super) struct Found {
    pub rule: Rule,
    /// Percentage of elements that it gives exactly.
    pub exact_percent: usize,
}

/// Bytes of the column `step`: forms and numbers of a step, of a first and of a second moment.
pub(super) const STEP_BYTES: usize = 36;

impl Rule {
    /// Name of its column.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Step(_) => COLUMNS_OF_STEP[0],
            Self::Moment(_) => COLUMNS_OF_MOMENT[0],
        }
    }

    /// The column: forms and numbers.
    pub(super) fn column(&self) -> Vec<u8> {
        let mut column = Vec::with_capacity(STEP_BYTES);
        let second = match self {
            Self::Step(by) => {
                put_step(by.step, &mut column);
                gradient::put_blend(by.first, &mut column);
                by.second
            }
            Self::Moment(second) => *second,
        };
        gradient::put_second(second, &mut column);
        column
    }

    pub(super) fn read(column: &[u8], is_step: bool) -> Result<Self> {
        let mut cursor = Cursor::new(column, "forms and numbers");
        let mut read = || match is_step {
            true => {
                let step = read_step(&mut cursor)?;
                let first = gradient::read_blend(&mut cursor)?;
                Ok(Self::Step(Step { first, second: gradient::read_second(&mut cursor)?, step }))
            }
            false => Ok(Self::Moment(gradient::read_second(&mut cursor)?)),
        };
        let rule = read().map_err(|e: Error| e.clause("joint 3"))?;
        cursor.finish().map_err(|e| e.clause("joint 3"))?;
        Ok(rule)
    }
}
