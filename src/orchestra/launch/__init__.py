# SPDX-License-Identifier: Apache-2.0
"""How the processes of a run come to life."""
