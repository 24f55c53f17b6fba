"""Training a DFlash drafter: prompts, the target's answers with their tap rows, the objective, the result.

    prompts.py     what is asked: a file of chats, or questions the target invents itself
    writing.py     what is asked of the target, and what it gives back
    shards.py      answers and tap rows on disk, memory-mapped, each file written once
    corpus.py      what a training reads, of one data directory or several
    data.py        prompts -> answers -> shards, resumable after a kill at any moment
    network.py     the drafter as a trainable module; the formulas of `drafter/dflash.py`
    blocks.py      anchors, labels and masks of a training batch
    head.py        the target's head, whole or sampled
    losses.py      cross-entropy, distillation
    fit.py         the loop: one process or many, exact resume
    walk.py        what drafting would have accepted on recorded text
    export.py      the published layout, and the model card

Nothing here but `ray_road.py` needs Ray, a socket or a network, so that a bare GPU machine can train.
"""
