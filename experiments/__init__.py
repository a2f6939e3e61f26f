# SPDX-License-Identifier: Apache-2.0
"""Claims of papers, put to the test in a few minutes each: `python -m experiments.<name>`.

Every study is a folder: `__main__.py` runs it and checks what was expected, `results.json` holds the figures of a run,
README.md says what they mean.
"""
