"""The fault harness: real parts, taken away under a seeded schedule, and what must hold afterwards.

    schedule   a seed to what is asked of the phones and what goes wrong when (pure)
    world      the parts as processes: adb server, adbd and agent a phone, collector, SQLite or PostgreSQL
    wifi       a link that delays, stalls, half-opens and cuts
    database   the database, and what goes wrong with it
    actions    every fault: how it is done and how it is taken back (`host_faults`, `phone_faults`)
    truth      the database against the engines' own copies and the runs' own counts and hashes
    files      the stored files against the engines' own copies of them
    leaks      descriptors, threads, memory, forwards, processes: where they were, where they are
    play       one schedule from its seed to its result
    made       what every play begins with and none changes, made once and copied
    typed      `bmoe` commands typed one after the other in one process
    asking     `bmoe-agent status` asked again and again by one process
    entry      the agent's and the collector's processes with timers scaled (and, for the harness's own tests, planted defects)

`python -m faults.harness` (with tests/ on the path; `make test-faults`) plays many and writes a JSON line each.
"""
