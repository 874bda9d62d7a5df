//! One way to round a tensor, and its text form.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::codec::{Blockwise8, Cluster, CodeMap, Codec, Edges, KMeans, LevelError};
use crate::{Dtype, Error, Result};

/// Rounding of a tensor before it is stored. Tensors of f32 take all settings, those of bf16 only `kmeans`. Any other tensor
/// is never rounded.
///
/// Text forms:
/// - `lossless`
/// - `loguniform:STEPS`, with steps per octave, a power of two
/// - `remainder:BITS`
/// - `cluster[:CLUSTERS][:normal|sample][:linear|dynamic]`
/// - `kmeans[:LEVELS][:pruned=N][:protected=N][:absolute|relative|sensitive]`, with N in thousandths
/// - `blockwise8`
///
/// ```
/// use tensorcask::{codec::Cluster, precision::Setting};
/// assert_eq!("loguniform:16".parse::<Setting>()?, Setting::LogUniform { steps: 16 });
/// assert_eq!("cluster".parse::<Setting>()?, Setting::Cluster(Cluster::default()));
/// for text in ["remainder:8", "cluster:16:normal:dynamic", "kmeans:64:pruned=10:protected=5:relative", "blockwise8"] {
///     assert_eq!(text.parse::<Setting>()?.to_string(), text);
/// }
/// assert!("loguniform:15".parse::<Setting>().is_err());
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Setting {
    /// No rounding.
    #[default]
    Lossless,
    /// Rounding to the nearest number of a logarithmic grid with 1, 2, 4, ... or 128 steps per octave. The relative
    /// error is at most (2^(1/steps) - 1) / (2^(1/steps) + 1). Zeros, denormals and non-finite numbers stay.
    LogUniform {
        /// Steps per octave.
        steps: u8,
    },
    /// Rounding to 0 to 16 bits beyond the 16-bit rounding of each number. A master uses its model weight as that
    /// rounding, if the state contains the weight in bf16 or f16.
    Remainder {
        /// Number of bits beyond the 16-bit rounding.
        bits: u8,
    },
    /// Clusters, as in BitSnap.
    Cluster(Cluster),
    /// Pruned, quantized and protected numbers, as in DynaQuant.
    KMeans(KMeans),
    /// Dynamic 8-bit numbers in blocks, as in 8-bit optimizers.
    Blockwise8,
}

impl Setting {
    /// Text forms, for error messages.
    pub(crate) const FORMS: &str = "lossless, loguniform:STEPS, remainder:BITS, cluster[:CLUSTERS][:normal|sample][:linear|dynamic], \
                                    kmeans[:LEVELS][:pruned=N][:protected=N][:absolute|relative|sensitive], blockwise8";

    pub(crate) fn check(&self) -> Result<()> {
        let good = match self {
            Self::Lossless | Self::Blockwise8 => true,
            Self::LogUniform { steps } => steps.is_power_of_two(),
            Self::Remainder { bits } => *bits <= 16,
            Self::Cluster(cluster) => (1..=16).contains(&cluster.clusters),
            Self::KMeans(kmeans) => (2..=256).contains(&kmeans.levels) && kmeans.pruned <= 1000 && kmeans.protected <= 1000,
        };
        if good { Ok(()) } else { Err(Error::invalid(format!("`{self}` is out of range; use one of {}", Self::FORMS))) }
    }

    /// Returns the codec that rounds and stores numbers in one step, if the setting has one.
    pub fn codec(&self) -> Option<Arc<dyn Codec>> {
        match *self {
            Self::Cluster(cluster) => Some(Arc::new(cluster)),
            Self::KMeans(kmeans) => Some(Arc::new(kmeans)),
            Self::Blockwise8 => Some(Arc::new(Blockwise8)),
            Self::Lossless | Self::LogUniform { .. } | Self::Remainder { .. } => None,
        }
    }

    /// Returns whether the setting rounds tensors of a type.
    pub(crate) fn rounds(&self, dtype: Dtype) -> bool {
        dtype == Dtype::F32 || dtype == Dtype::Bf16 && matches!(self, Self::KMeans(_))
    }

    /// Declared work of rounding a chunk, in copies of the chunk. The work of a codec that rounds is that of its encoding.
    pub(crate) fn work(&self) -> f32 {
        match self {
            Self::LogUniform { .. } | Self::Remainder { .. } => 1.0,
            Self::Lossless | Self::Cluster(_) | Self::KMeans(_) | Self::Blockwise8 => 0.0,
        }
    }

    /// Returns whether each number is rounded on its own. Then equal numbers stay equal, whatever else the chunk
    /// contains.
    pub(crate) fn is_elementwise(&self) -> bool {
        self.codec().is_none()
    }

    /// Returns the next finer setting.
    pub(crate) fn finer(&self) -> Self {
        match *self {
            Self::LogUniform { steps } if steps < 128 => Self::LogUniform { steps: steps * 2 },
            Self::Remainder { bits } if bits < 15 => Self::Remainder { bits: bits + 1 },
            Self::KMeans(kmeans) if kmeans.levels < 256 => Self::KMeans(KMeans { levels: (kmeans.levels * 2).min(256), ..kmeans }),
            _ => Self::Lossless,
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lossless => f.write_str("lossless"),
            Self::LogUniform { steps } => write!(f, "loguniform:{steps}"),
            Self::Remainder { bits } => write!(f, "remainder:{bits}"),
            Self::Cluster(Cluster { clusters, edges, map }) => {
                let edges = if *edges == Edges::Normal { "normal" } else { "sample" };
                let map = if *map == CodeMap::Linear { "linear" } else { "dynamic" };
                write!(f, "cluster:{clusters}:{edges}:{map}")
            }
            Self::KMeans(KMeans { levels, pruned, protected, error }) => {
                let errors = match error {
                    LevelError::Absolute => "absolute",
                    LevelError::Relative => "relative",
                    LevelError::Sensitive => "sensitive",
                };
                write!(f, "kmeans:{levels}:pruned={pruned}:protected={protected}:{errors}")
            }
            Self::Blockwise8 => f.write_str("blockwise8"),
        }
    }
}

impl FromStr for Setting {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || Error::invalid(format!("`{}` is not a setting; use one of {}", text.escape_debug(), Self::FORMS));
        let mut words = text.split(':');
        let name = words.next().unwrap_or_default();
        let number = |word: Option<&str>| word.and_then(|word| word.parse().ok()).ok_or_else(unknown);
        let setting = match name {
            "lossless" => Self::Lossless,
            "blockwise8" => Self::Blockwise8,
            "loguniform" => Self::LogUniform { steps: number(words.next())? },
            "remainder" => Self::Remainder { bits: number(words.next())? },
            "cluster" => {
                let mut cluster = Cluster::default();
                for word in words.by_ref() {
                    match word {
                        "normal" => cluster.edges = Edges::Normal,
                        "sample" => cluster.edges = Edges::Sample,
                        "linear" => cluster.map = CodeMap::Linear,
                        "dynamic" => cluster.map = CodeMap::Dynamic,
                        clusters => cluster.clusters = number(Some(clusters))?,
                    }
                }
                Self::Cluster(cluster)
            }
            "kmeans" => {
                let mut kmeans = KMeans::default();
                for word in words.by_ref() {
                    let of_thousand = |n: &str| n.parse().map_err(|_| unknown());
                    match word.split_once('=') {
                        Some(("pruned", n)) => kmeans.pruned = of_thousand(n)?,
                        Some(("protected", n)) => kmeans.protected = of_thousand(n)?,
                        Some(_) => return Err(unknown()),
                        None if word == "absolute" => kmeans.error = LevelError::Absolute,
                        None if word == "relative" => kmeans.error = LevelError::Relative,
                        None if word == "sensitive" => kmeans.error = LevelError::Sensitive,
                        None => kmeans.levels = of_thousand(word)?,
                    }
                }
                Self::KMeans(kmeans)
            }
            _ => return Err(unknown()),
        };
        if words.next().is_some() {
            return Err(unknown());
        }
        setting.check()?;
        Ok(setting)
    }
}
