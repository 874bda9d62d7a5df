//! Form and numbers of a replay, and the column that stores them. Spec: `spec/codecs/replay.md`, clause 3.

use tensorcask_kernels::replay::{Divisor, Moment, Square, Step, Update};

use super::super::residual::{COLUMNS_OF_MOMENT, COLUMNS_OF_STEP};
use crate::wire::{Cursor, Put};
use crate::{Error, Result};

/// Form and numbers of a replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Rule {
    Step(Step),
    Moment(Moment),
}

impl Rule {
    /// Name of its column.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Step(_) => COLUMNS_OF_STEP[0],
            Self::Moment(_) => COLUMNS_OF_MOMENT[0],
        }
    }

    /// The column: codes of the forms, then the numbers.
    pub(super) fn column(&self) -> Vec<u8> {
        let mut column = Vec::with_capacity(STEP_BYTES);
        let numbers: &[f32] = match self {
            Self::Step(step) => {
                put_step(*step, &mut column);
                &[]
            }
            Self::Moment(moment) => {
                column.put_u8(code_of(&Square::ALL, &moment.square));
                &[moment.decay, moment.share, moment.weight]
            }
        };
        numbers.iter().for_each(|number| column.put_u32(number.to_bits()));
        column
    }
}

/// Bytes of column `step`: two forms and four numbers.
pub(super) const STEP_BYTES: usize = 18;

/// Code of a form: its position in the table of the spec.
fn code_of<T: PartialEq>(all: &[T], form: &T) -> u8 {
    all.iter().position(|known| known == form).unwrap_or(0) as u8
}

fn form<T: Copy>(all: &[T], code: u8) -> Result<T> {
    let found = all.get(usize::from(code)).copied();
    found.ok_or_else(|| Error::corrupt(format!("form {code}; the last one known is {}", all.len() - 1)))
}

/// Writes the forms and numbers of a step: 18 bytes.
pub(in crate::codec) fn put_step(step: Step, column: &mut Vec<u8>) {
    column.put_u8(code_of(&Update::ALL, &step.update));
    column.put_u8(code_of(&Divisor::ALL, &step.divisor));
    [step.decay, step.scale, step.correction, step.epsilon].into_iter().for_each(|number| column.put_u32(number.to_bits()));
}

/// Inverts [`put_step`].
pub(in crate::codec) fn read_step(cursor: &mut Cursor<'_>) -> Result<Step> {
    let update = cursor.u8()?;
    let divisor = cursor.u8()?;
    let [decay, scale, correction, epsilon] = [cursor.u32()?, cursor.u32()?, cursor.u32()?, cursor.u32()?].map(f32::from_bits);
    Ok(Step { update: form(&Update::ALL, update)?, divisor: form(&Divisor::ALL, divisor)?, decay, scale, correction, epsilon })
}

pub(super) fn read_step_column(column: &[u8]) -> Result<Rule> {
    let mut cursor = Cursor::new(column, "forms and numbers");
    let step = read_step(&mut cursor).map_err(|e| e.clause("replay 3"))?;
    cursor.finish().map_err(|e| e.clause("replay 3"))?;
    Ok(Rule::Step(step))
}

pub(super) fn read_moment(column: &[u8]) -> Result<Rule> {
    let mut cursor = Cursor::new(column, "forms and numbers");
    let mut read = || -> Result<(u8, [f32; 3])> {
        let code = cursor.u8()?;
        let numbers = [cursor.u32()?, cursor.u32()?, cursor.u32()?];
        Ok((code, numbers.map(f32::from_bits)))
    };
    let (square, [decay, share, weight]) = read().map_err(|e| e.clause("replay 3"))?;
    cursor.finish().map_err(|e| e.clause("replay 3"))?;
    let square = form(&Square::ALL, square).map_err(|e| e.clause("replay 3"))?;
    Ok(Rule::Moment(Moment { square, decay, share, weight }))
}
