"""Set what JAX reads when it is imported, whichever test comes first."""

import os

# Two devices for `shard_map`, one thread, and little optimization: tests compile many small programs once.
_FLAGS = (
    "--xla_force_host_platform_device_count=2",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
