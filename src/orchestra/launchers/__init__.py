# SPDX-License-Identifier: Apache-2.0
"""Programs that start the processes of a run on other machines."""
