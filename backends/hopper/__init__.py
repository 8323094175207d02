"""Warp-specialised kernels for Hopper GPUs (sm_90), in Triton's Gluon.

The program's functions and loops are printed by :mod:`..emit`, and so read the same in both
families of kernels; what is here is what runs them at the speed of the hardware.
"""
