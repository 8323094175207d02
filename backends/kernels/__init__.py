"""Code that both families of generated kernels share: configs, compiling, arguments, launches."""
