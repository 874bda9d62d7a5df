#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 writes zarr 3 through its API v1 and zarr 2 through the older one, under other paths.
