"""For people who try, test and measure.

``doctor``      ``allscan doctor``: what this machine has, and a self-test.
``ranks``       ranks on this machine without torchrun.
``timing``      times on a GPU.
``compiled``    registers, spills and PTX of a kernel, without a GPU.
``provenance``  which software and which sources a result is of.
"""
