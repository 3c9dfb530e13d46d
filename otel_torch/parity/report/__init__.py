"""Renderers of a comparison: `text` for a terminal, `html` for one page to look around in,
`junit` and `sarif` for CI.

A new renderer is a module of this package. It takes a `finding.Report`, chooses what to show with
`pairs`, and takes its sentences from `wording` and `next_steps`.
"""
