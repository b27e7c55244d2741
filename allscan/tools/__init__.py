"""Tools for trying, testing and measuring.

``doctor``      ``allscan doctor``: a report on this machine, and a self-test.
``ranks``       ranks on this machine without torchrun.
``timing``      times on a GPU.
``compiled``    registers, spills and PTX of a kernel, compiled without a GPU.
"""
