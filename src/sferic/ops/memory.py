"""The C library's allocator, for processes whose time goes into large tensors on a CPU."""

import ctypes

# of glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process reuse the memory of freed tensors instead of giving it back at once.

    glibc returns large blocks to the system, so every large tensor is faulted in page by page: a
    fifth of a long forward pass.  For the programs that own their process; importing sferic
    changes nothing.  Returns whether the C library took the settings; they have no effect in a
    process, one of several, where the system left the heap no room to grow.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
