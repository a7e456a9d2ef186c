"""Two sides against each other: are they comparable, do they differ, and could these runs have shown it.

`sides` finds the runs, `comparable` says why not, `statistics` is the arithmetic of `metrics`, `answer` puts one comparison together,
`question` answers what a plan asked before it ran, `sandwich` compares settings that alternate inside one run.
"""
