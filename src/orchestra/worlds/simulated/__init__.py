# SPDX-License-Identifier: Apache-2.0
"""A cluster in virtual time: the same strategies, real gradients, a modelled network."""
