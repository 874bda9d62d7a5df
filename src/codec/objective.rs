//! The goal of the choice of codecs: weights of size and speed, or the least time until a save is durable.

use crate::{Error, Result};

/// Weights for the choice of codecs, in thousandths that add up to 1000.
///
/// The score of a candidate is the weighted sum of three scores from 0 to 1 (BitSnap, arXiv 2511.12376, equation 5).
/// Size and speed are relative to the best candidate. Speed is declared by the codec ([`Codec::cost`](super::Codec::cost)), not measured,
/// so a choice does not depend on the speed of the machine. Precision is the mean squared error, relative to the least. It
/// counts where a rule allows several settings ([`Precision::with_any`](crate::Precision::with_any)). The candidates of one
/// chunk are lossless, and have the precision score 1.
///
/// ```
/// use tensorcask::codec::Objective;
/// assert_eq!(Objective::from_name("balanced")?, Objective::BALANCED);
/// assert_eq!(Objective::from_name("0.6,0.3,0.1")?, Objective { size: 600, speed: 300, precision: 100 });
/// assert!(Objective::from_name("0.6,0.3,0.3").is_err());
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Objective {
    /// Weight of the size score.
    pub size: u16,
    /// Weight of the speed score.
    pub speed: u16,
    /// Weight of the precision score.
    pub precision: u16,
}

impl Default for Objective {
    fn default() -> Self {
        Self::BALANCED
    }
}

impl Objective {
    /// Fewest bytes, at any cost in time.
    pub const SMALLEST: Self = Self { size: 1000, speed: 0, precision: 0 };
    /// Few bytes. Gives up the last few percent of size if they take several times the work.
    pub const BALANCED: Self = Self { size: 960, speed: 40, precision: 0 };
    /// Little work, unless more work saves about a quarter of the bytes.
    pub const FASTEST: Self = Self { size: 720, speed: 280, precision: 0 };

    /// Parses `smallest`, `balanced`, `fastest`, or three weights that add up to 1: size, speed, precision.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "smallest" => return Ok(Self::SMALLEST),
            "balanced" => return Ok(Self::BALANCED),
            "fastest" => return Ok(Self::FASTEST),
            _ => {}
        }
        let weight = |text: &str| text.trim().parse::<f64>().ok().filter(|w| (0.0..=1.0).contains(w)).map(|w| (w * 1000.0).round() as u16);
        let weights: Option<Vec<u16>> = name.split(',').map(weight).collect();
        match weights.as_deref() {
            Some(&[size, speed, precision]) if size + speed + precision == 1000 => Ok(Self { size, speed, precision }),
            _ => Err(Error::invalid(format!(
                "`{}` is not an objective; use smallest, balanced, fastest, or three weights of size, speed and precision that add up to 1",
                name.escape_debug()
            ))),
        }
    }

    /// Scores a candidate by its measures, relative to the least of all candidates.
    pub(super) fn score(self, candidate: Measures, least: Measures) -> f64 {
        let size = least.bytes as f64 / candidate.bytes.max(1) as f64;
        let speed = f64::from(least.work) / f64::from(candidate.work.max(f32::MIN_POSITIVE));
        let precision = if candidate.squares > least.squares { least.squares / candidate.squares } else { 1.0 };
        f64::from(self.size) * size + f64::from(self.speed) * speed + f64::from(self.precision) * precision
    }
}

/// Measures of one way to store a chunk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Measures {
    /// Bytes in the cask, padding included.
    pub bytes: u64,
    /// Declared work, in copies of the chunk.
    pub work: f32,
    /// Sum of the squared errors of all elements.
    pub squares: f64,
}

impl Measures {
    /// The least of each measure.
    pub(super) fn least(self, other: Self) -> Self {
        Self { bytes: self.bytes.min(other.bytes), work: self.work.min(other.work), squares: self.squares.min(other.squares) }
    }
}

impl std::fmt::Display for Objective {
    /// Writes a name that [`Objective::from_name`] parses.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::SMALLEST => f.write_str("smallest"),
            Self::BALANCED => f.write_str("balanced"),
            Self::FASTEST => f.write_str("fastest"),
            Self { size, speed, precision } => {
                let [size, speed, precision] = [size, speed, precision].map(|weight| f64::from(weight) / 1000.0);
                write!(f, "{size},{speed},{precision}")
            }
        }
    }
}

/// Objective of a writer: fixed, or chosen by measurement.
///
/// ```
/// use tensorcask::codec::{Objective, ObjectiveSetting};
/// assert_eq!(ObjectiveSetting::from_name("auto")?, ObjectiveSetting::Auto);
/// assert_eq!(ObjectiveSetting::from_name("fastest")?, ObjectiveSetting::Fixed(Objective::FASTEST));
/// assert_eq!(ObjectiveSetting::Auto.to_string(), "auto");
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectiveSetting {
    /// One objective for all chunks.
    Fixed(Objective),
    /// The objective that makes the save durable as early as possible: `fastest`, `balanced` or `smallest`, chosen for
    /// each window of 16 MiB from the measured rates of encoding and uploading. Two saves of one state may store
    /// different bytes.
    Auto,
}

impl ObjectiveSetting {
    /// Parses `auto`, or what [`Objective::from_name`] parses.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            _ => Objective::from_name(name).map(Self::Fixed).map_err(|_| {
                Error::invalid(format!(
                    "`{}` is not an objective; use auto, smallest, balanced, fastest, or three weights of size, speed and precision that add up to 1",
                    name.escape_debug()
                ))
            }),
        }
    }
}

impl Default for ObjectiveSetting {
    fn default() -> Self {
        Self::Fixed(Objective::default())
    }
}

impl From<Objective> for ObjectiveSetting {
    fn from(objective: Objective) -> Self {
        Self::Fixed(objective)
    }
}

impl std::fmt::Display for ObjectiveSetting {
    /// Writes a name that [`ObjectiveSetting::from_name`] parses.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fixed(objective) => objective.fmt(f),
            Self::Auto => f.write_str("auto"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Objective, ObjectiveSetting};

    #[test]
    fn a_written_objective_parses_to_itself() {
        for name in ["auto", "smallest", "balanced", "fastest", "0.6,0.3,0.1", "1,0,0", "0.333,0.333,0.334"] {
            let setting = ObjectiveSetting::from_name(name).unwrap();
            assert_eq!(ObjectiveSetting::from_name(&setting.to_string()).unwrap(), setting, "{name}");
        }
        assert_eq!(ObjectiveSetting::from_name("1,0,0").unwrap(), Objective::SMALLEST.into());
        assert!(ObjectiveSetting::from_name("quickest").unwrap_err().message().contains("use auto, smallest"));
    }
}
