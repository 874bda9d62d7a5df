# `just` is a convenience: every recipe is one command of README or CONTRIBUTING.

# What CI runs.
check:
    bash .ci/run

# All tests, with an S3 server on loopback.
test *arguments:
    bash tests/run {{arguments}}

# The Python package: build, tests, types, a training run killed and resumed.
python *arguments:
    bash python/check {{arguments}}

# The main job on real checkpoints.
demo:
    bash examples/demo

# Format the code.
fmt:
    cargo fmt --all

# Benchmarks: container, open, save_restore.
bench name *arguments:
    cargo bench --bench {{name}} -- {{arguments}}

# Peers and us on the same tensors.
peers *arguments:
    bash benches/peers/run {{arguments}}
