# SPDX-License-Identifier: Apache-2.0
"""A replica of the model as flat vectors, and the optimizer that updates it."""
