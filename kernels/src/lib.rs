//! Inner loops of tensorcask, and nearly all its unsafe code. Each kernel has a scalar form; tests compare its SIMD forms
//! with the scalar form.
//!
//! This crate knows bytes and numbers, and nothing of tensors, stores and their format. It is a part of `tensorcask` without an
//! interface of its own: any release may change it.
#![allow(missing_docs, reason = "no interface for others: fields and variants whose names say it have no text")]

/// Environment variable that names the best level to use, for measurements: `scalar`, `avx2` or `avx512`.
const SWITCH: &str = "TENSORCASK_KERNELS";

/// Size of the largest vectors in bytes.
const VECTOR_BYTES: usize = 64;

/// Instruction set of the processor, detected once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The compiler's default target.
    Scalar,
    /// x86-64-v3: AVX2, BMI.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// x86-64-v4 with VBMI and VBMI2.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Returns the best level of this machine, or a lower level that the environment asks for.
    pub fn best() -> Self {
        #[cfg(feature = "fuzzing")]
        if SCALAR_ONLY.get() {
            return Self::Scalar;
        }
        static BEST: std::sync::OnceLock<Level> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| Self::detect().limited_by(std::env::var(SWITCH).ok().as_deref()))
    }

    /// Returns the level that a user asks for, or this level if the processor can do no more.
    fn limited_by(self, wanted: Option<&str>) -> Self {
        let wanted = match wanted {
            None | Some("") => return self,
            Some("scalar") => Self::Scalar,
            #[cfg(target_arch = "x86_64")]
            Some("avx2") => Self::Avx2,
            #[cfg(target_arch = "x86_64")]
            Some("avx512") => Self::Avx512,
            Some(other) => {
                tracing::warn!("{SWITCH}={other} is not a kernel of this processor; using {self:?}");
                return self;
            }
        };
        if wanted > self {
            tracing::warn!("{SWITCH}: this processor has no {wanted:?}; using {self:?}");
        }
        wanted.min(self)
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Self {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512cd")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vbmi2");
        match (avx512, avx2) {
            (true, _) => Self::Avx512,
            (_, true) => Self::Avx2,
            _ => Self::Scalar,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> Self {
        Self::Scalar
    }

    /// Returns all levels that this machine supports.
    #[cfg(test)]
    pub fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let all = [Self::Scalar, Self::Avx2, Self::Avx512];
        #[cfg(not(target_arch = "x86_64"))]
        let all = [Self::Scalar];
        all.into_iter().filter(|level| *level <= Self::detect()).collect()
    }
}

#[cfg(feature = "fuzzing")]
thread_local! {
    static SCALAR_ONLY: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs a function with the scalar kernels on this thread. Fuzz targets compare both forms.
#[cfg(feature = "fuzzing")]
pub fn with_scalar<T>(run: impl FnOnce() -> T) -> T {
    SCALAR_ONLY.set(true);
    let result = run();
    SCALAR_ONLY.set(false);
    result
}

/// Compiles one body for every [`Level`] and picks one at run time, for loops that the compiler vectorises without
/// intrinsics. The body must be `#[inline(always)]`.
macro_rules! for_every_level {
    ($(#[$doc:meta])* $visibility:vis fn $name:ident / $at:ident ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $body:path;) => {
        $(#[$doc])*
        $visibility fn $name($($argument: $type),*) $(-> $result)? {
            $at($crate::Level::best() $(, $argument)*)
        }

        fn $at(level: $crate::Level $(, $argument: $type)*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
            fn avx512($($argument: $type),*) $(-> $result)? {
                $body($($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                $body($($argument),*)
            }
            match level {
                $crate::Level::Scalar => $body($($argument),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Level` comes from detection alone, which found these features.
                $crate::Level::Avx2 => unsafe { avx2($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::Level::Avx512 => unsafe { avx512($($argument),*) },
            }
        }
    };
}
pub(crate) use for_every_level;

#[allow(unsafe_code, reason = "unchecked loads and stores where room for all of them was made before")]
pub mod bits;
#[allow(unsafe_code, reason = "vector loads and stores within checked bounds")]
pub mod bytes;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod clusters;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod descent;
pub mod digits;
#[allow(unsafe_code, reason = "reads and writes the floating-point control register")]
mod environment;
pub use environment::DefaultEnvironment;
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
pub use environment::with_odd_environment;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod errors;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod factored;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod finite;
mod float8;
pub mod floats;
#[cfg_attr(test, allow(unsafe_code, reason = "a test calls a function compiled for a detected processor feature"))]
pub mod fma;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod gradient;
#[allow(unsafe_code, reason = "unchecked stores in the decoder's inner loop; bounds are checked once per burst")]
pub mod huffman;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod joint;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod loguniform;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod magnitudes;
#[allow(unsafe_code, reason = "mapping a file is unsafe; the safety argument stands at the call")]
pub mod map;
#[allow(unsafe_code, reason = "vector loads and stores within checked bounds")]
pub mod mask;
pub mod memory;
mod number;
pub use number::{Float8Format, NumberFormat};
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod ordered;
#[allow(unsafe_code, reason = "vector loads and stores within checked bounds")]
pub mod part;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod planes;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod predict;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod remainder;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod replay;
pub mod row_hash;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod runs;
#[cfg(target_arch = "x86_64")]
mod shuffles;
pub mod sketch;
pub mod spare;
pub mod sparse;
#[allow(unsafe_code, reason = "vector loads and stores within checked bounds")]
pub mod split;
#[allow(unsafe_code, reason = "calls of functions compiled for detected processor features")]
pub mod statistics;

#[cfg(test)]
mod tests {
    use super::Level;

    #[test]
    fn the_switch_lowers_the_level_and_never_raises_it() {
        for level in Level::available() {
            assert_eq!(level.limited_by(None), level);
            assert_eq!(level.limited_by(Some("scalar")), Level::Scalar);
            assert_eq!(level.limited_by(Some("avx512")), level);
            assert_eq!(level.limited_by(Some("AVX 9")), level);
        }
    }
}
