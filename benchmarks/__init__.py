# SPDX-License-Identifier: Apache-2.0
"""Side by side with the peers, on this machine, interleaved: one script per question.

`python -m benchmarks.all` runs all of them and writes `benchmarks/results/`. `benchmarks/RESULTS.md` has the claims.
"""
