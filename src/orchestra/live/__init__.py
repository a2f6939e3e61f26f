# SPDX-License-Identifier: Apache-2.0
"""Live views of runs while they go on: in a terminal and in a browser."""
