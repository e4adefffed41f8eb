"""A campaign against ecnn: kills, faults, damaged files, wrong options and arguments, and repeated use.

A case is determined by the seed, the name of its part and its number, so that a violation can be repeated:
`python -m campaign --only kills:17`. Cases run in forked children of one process that has imported everything, so that
thousands fit in a minute.
"""
