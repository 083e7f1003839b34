"""The runtime under a seeded order of who runs next, with faults and delays: what fails, fails again by its seed.

Every thread of the runtime is a real thread, but only the one that has the baton runs. Wherever it uses what threads wait
for each other by (a queue, a lock, a condition, the start or the end of a thread), and before and after every instruction,
a generator of random numbers says who goes on; in some files, before a line, too::

    caller      start ─▶┐             ┌─▶ get ─▶┐                         ┌─▶ join: the end
    stage 0.0           └─▶ 0F0, put ─┼─────────┼─▶ waits for 1B0 ·········┼────────▶┐
    stage 1.0                         │         └─▶ 1F0, lock ─▶┐          │         └─▶ …
                                                                └─ drawn ──┘
                ─────────────────────────────────────────────────────────────────────────▶ steps

Nobody can go on: time does, to the first of those that wait for some seconds only. There is no such: that is a hang, and the
report says who waits where. Neither the clock nor the system's scheduler has a say, so a seed is an order.

    scheduler.py   who runs next, and what stands for threads, locks, queues and time
    installed.py   which modules of fxsplit get these
    cases.py       what is played: schedules, what travels, replicas, who meets, whose weights are fetched; and faults
    numbers.py     the real tape, workers, turns, values, sums, notes; instructions keep books and compute nothing
    tensors.py     whole pipelines with torch, bit for bit what the same call gives without a simulation
    ranks.py       ranks: the real hub, channel and watch, over a network, a store and a clock that are simulated

What has to hold after each: the error is the one that was injected (of several, the one that a loop would have come to
first), with a note that names stage, micro-batch and action; no thread is left; every instruction was played once, after
all that it waits for; sums, values and buffers came about in the order of one thread; the next call is right. Of ranks: all
others end with one error that names the rank; every message is taken once.

    python -m tests.simulated --interleavings 1000000 --seed 0          numbers; or: tensors, ranks
    python -m tests.simulated ranks --interleavings 1 --seed 1234       just that one again
"""
