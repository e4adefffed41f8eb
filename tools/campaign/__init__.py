"""A campaign against ecnn: kills, faults, damaged files, wrong options and arguments, and repeated use.

Every case is decided by the seed, the name of its part and its number, so that a violation can be seen again:
`python -m campaign --only kills:17`. Cases run in children of one process that has loaded everything, so that
thousands fit in a minute.
"""
