"""Paceline: a distributed LLM server on Ray, built around DFlash speculative decoding.

The repository root is this package. Its rooms, from the ground floor up:

    cluster     what every process agrees on: configuration, messages, errors, channels, placement
    scheduler   the state machine that owns every decision
    kernels     numerical operations, each beside its plain reference
    workers     one rank of the target model
    drafter     the proposer of drafts
    deploy      the front door: command line, HTTP, assembly

A room imports from lower floors only. This file imports nothing.
"""
