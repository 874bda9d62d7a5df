//! Element types. Codes and names: `spec/container.md`, clause 7.

use tensorcask_kernels::{Float8Format, NumberFormat};

use crate::{Error, Result};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal, $bits:literal;)*) => {
        /// Type of a tensor's elements.
        ///
        /// Elements are little-endian. Types smaller than a byte are packed, low bits first. Unused bits of the last
        /// byte are zero.
        ///
        /// ```
        /// use tensorcask::Dtype;
        /// assert_eq!(Dtype::Bf16.bits(), 16);
        /// assert_eq!(Dtype::from_name("f8_e4m3").unwrap(), Dtype::F8E4M3);
        /// assert_eq!(Dtype::Int4.byte_count(5), Some(3));
        /// ```
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum Dtype { $($(#[$doc])* $variant = $code,)* }

        impl Dtype {
            /// All types, by code.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the code in an index.
            pub fn code(self) -> u8 { self as u8 }

            /// Returns the type of a code in an index.
            pub fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// Returns the name in JSON and on the command line.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the bits of one element.
            pub fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)* }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    Bool = 1, "bool", 8;
    /// Unsigned, 8 bits.
    U8 = 2, "u8", 8;
    /// Unsigned, 16 bits.
    U16 = 3, "u16", 16;
    /// Unsigned, 32 bits.
    U32 = 4, "u32", 32;
    /// Unsigned, 64 bits.
    U64 = 5, "u64", 64;
    /// Signed, 8 bits.
    I8 = 6, "i8", 8;
    /// Signed, 16 bits.
    I16 = 7, "i16", 16;
    /// Signed, 32 bits.
    I32 = 8, "i32", 32;
    /// Signed, 64 bits.
    I64 = 9, "i64", 64;
    /// IEEE 754 binary16.
    F16 = 10, "f16", 16;
    /// bfloat16: the upper half of a binary32.
    Bf16 = 11, "bf16", 16;
    /// IEEE 754 binary32.
    F32 = 12, "f32", 32;
    /// IEEE 754 binary64.
    F64 = 13, "f64", 64;
    /// Two binary32: real part, imaginary part.
    C64 = 14, "c64", 64;
    /// Two binary64: real part, imaginary part.
    C128 = 15, "c128", 128;
    /// OCP 8-bit float, 4 exponent bits, finite and NaN only.
    F8E4M3 = 16, "f8_e4m3", 8;
    /// OCP 8-bit float, 5 exponent bits.
    F8E5M2 = 17, "f8_e5m2", 8;
    /// 8-bit float, 4 exponent bits, no negative zero.
    F8E4M3Fnuz = 18, "f8_e4m3fnuz", 8;
    /// 8-bit float, 5 exponent bits, no negative zero.
    F8E5M2Fnuz = 19, "f8_e5m2fnuz", 8;
    /// OCP microscaling scale: exponent only.
    F8E8M0 = 20, "f8_e8m0", 8;
    /// OCP microscaling 6-bit float, 2 exponent bits; 4 elements in 3 bytes.
    F6E2M3 = 21, "f6_e2m3", 6;
    /// OCP microscaling 6-bit float, 3 exponent bits; 4 elements in 3 bytes.
    F6E3M2 = 22, "f6_e3m2", 6;
    /// OCP microscaling 4-bit float; 2 elements in a byte.
    F4E2M1 = 23, "f4_e2m1", 4;
    /// Signed, 4 bits; 2 elements in a byte.
    Int4 = 24, "int4", 4;
    /// Unsigned, 4 bits; 2 elements in a byte.
    Uint4 = 25, "uint4", 4;
}

impl Dtype {
    /// Returns the type with the given name, the inverse of [`Dtype::name`].
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|d| d.name() == name)
            .ok_or_else(|| Error::unsupported(format!("`{}` is not a dtype", name.escape_debug())).clause("container 7"))
    }

    /// Returns whether elements are smaller than a byte and therefore packed.
    pub fn is_packed(self) -> bool {
        self.bits() < 8
    }

    /// Returns whether elements are floats or complex numbers.
    pub fn is_float(self) -> bool {
        !matches!(
            self,
            Self::Bool
                | Self::U8
                | Self::U16
                | Self::U32
                | Self::U64
                | Self::I8
                | Self::I16
                | Self::I32
                | Self::I64
                | Self::Int4
                | Self::Uint4
        )
    }

    /// Format of the numbers of this type; `None` for integers, packed floats and complex numbers.
    pub(crate) fn number_format(self) -> Option<NumberFormat> {
        Some(match self {
            Self::F16 => NumberFormat::F16,
            Self::Bf16 => NumberFormat::Bf16,
            Self::F32 => NumberFormat::F32,
            Self::F64 => NumberFormat::F64,
            Self::F8E4M3 => NumberFormat::F8(Float8Format::E4M3),
            Self::F8E5M2 => NumberFormat::F8(Float8Format::E5M2),
            Self::F8E4M3Fnuz => NumberFormat::F8(Float8Format::E4M3Fnuz),
            Self::F8E5M2Fnuz => NumberFormat::F8(Float8Format::E5M2Fnuz),
            Self::F8E8M0 => NumberFormat::F8(Float8Format::E8M0),
            _ => return None,
        })
    }

    /// Format of the numbers that are measured: those of this type, or the parts of complex numbers, one after the other.
    /// All types that can hold NaN or infinities have one.
    pub(crate) fn measured_format(self) -> Option<NumberFormat> {
        match self {
            Self::C64 => Some(NumberFormat::F32),
            Self::C128 => Some(NumberFormat::F64),
            _ => self.number_format(),
        }
    }

    /// Returns how many numbers of the measured format an element holds.
    pub(crate) fn numbers_per_element(self) -> u64 {
        match self {
            Self::C64 | Self::C128 => 2,
            _ => 1,
        }
    }

    /// Returns the bytes of `elements` elements, or `None` beyond u64.
    pub fn byte_count(self, elements: u64) -> Option<u64> {
        elements.checked_mul(self.bits()).map(|bits| bits.div_ceil(8))
    }

    /// Returns the bytes of a unit, in which codecs compare and repeat. A unit is an element, half of a complex number,
    /// or the byte that packed elements share.
    pub fn unit_bytes(self) -> usize {
        match self {
            Self::C64 => 4,
            Self::C128 => 8,
            _ if self.is_packed() => 1,
            _ => (self.bits() / 8) as usize,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use tensorcask_kernels::NumberFormat;

    use super::Dtype;

    #[test]
    fn elements_that_can_be_nan_are_measured_number_by_number() {
        for &dtype in Dtype::ALL {
            let width = |format| match format {
                NumberFormat::F8(_) => 8,
                NumberFormat::F16 | NumberFormat::Bf16 => 16,
                NumberFormat::F32 => 32,
                NumberFormat::F64 => 64,
            };
            let measured = dtype.measured_format();
            assert_eq!(measured.is_some(), dtype.is_float() && !dtype.is_packed(), "{dtype}");
            assert!(measured.is_none_or(|format| width(format) * dtype.numbers_per_element() == dtype.bits()), "{dtype}");
            let is_complex = matches!(dtype, Dtype::C64 | Dtype::C128);
            assert_eq!(dtype.number_format(), measured.filter(|_| !is_complex), "{dtype}");
        }
    }
}
