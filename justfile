# `just` is a convenience: each recipe is one command of README or CONTRIBUTING.

# Format, lints and unit tests: the daily loop.
quick:
    cargo fmt --all
    cargo clippy --workspace --all-targets -- -D warnings
    bash .ci/python_lints
    cargo test --workspace --lib --bins

# What CI runs.
check:
    bash .ci/run

# Checks that take hours; goes on where it was interrupted.
thorough *checks:
    bash .ci/thorough {{checks}}

# All tests, with an S3 server on loopback.
test *arguments:
    bash tests/run {{arguments}}

# The Python package: build, tests, types, a training run killed and resumed.
python *arguments:
    bash python/check {{arguments}}

# The main job on real checkpoints.
demo:
    bash examples/demo

# The book: build it, and check its links.
docs:
    bash docs/check

# One benchmark: codecs, container, open, policies, precision, resolve, save_restore.
bench name *arguments:
    cargo bench --bench {{name}} -- {{arguments}}

# Comparison with other compressors on the same tensors.
peers *arguments:
    bash benches/peers/run {{arguments}}
