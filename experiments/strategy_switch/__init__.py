# SPDX-License-Identifier: Apache-2.0
"""Strategy-Switch between all-reduce and an asynchronous parameter server: see README.md."""
