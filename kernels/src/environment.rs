//! The floating-point environment of decoders: round to nearest, ties to even, subnormals kept. A program may have set
//! another environment for its threads.

/// Guard: while it lives, this thread follows the defaults of IEEE 754.
pub struct DefaultEnvironment {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    saved: u64,
}

#[cfg(target_arch = "x86_64")]
mod control {
    /// MXCSR after reset: all exceptions masked, round to nearest, no flush to zero.
    pub(super) const DEFAULT: u64 = 0x1f80;

    pub(super) fn get() -> u64 {
        let mut value = 0u32;
        // SAFETY: stores four bytes to a local variable.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
        value.into()
    }

    pub(super) fn set(value: u64) {
        let value = value as u32;
        // SAFETY: the value is the default or was read from the register, so no reserved bit is set. Code that runs in
        // between is compiled for the default environment, and runs in it.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod control {
    pub(super) const DEFAULT: u64 = 0;

    pub(super) fn get() -> u64 {
        let value: u64;
        // SAFETY: reads a register.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) value, options(nostack, preserves_flags)) };
        value
    }

    pub(super) fn set(value: u64) {
        // SAFETY: as on x86-64.
        unsafe { std::arch::asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
    }
}

impl DefaultEnvironment {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub fn enter() -> Self {
        let saved = control::get();
        control::set(control::DEFAULT);
        Self { saved }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn enter() -> Self {
        Self {}
    }
}

impl Drop for DefaultEnvironment {
    fn drop(&mut self) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        control::set(self.saved);
    }
}

/// For tests: runs a function with subnormals flushed to zero and another rounding mode, as a program may set them.
#[cfg(target_arch = "x86_64")]
pub fn with_odd_environment<T>(run: impl FnOnce() -> T) -> T {
    let saved = control::get();
    control::set(control::DEFAULT | 0x8040 | 0x6000);
    let result = run();
    control::set(saved);
    result
}
