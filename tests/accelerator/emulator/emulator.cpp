// An emulated asynchronous accelerator: a PrivateUse1 device named "emu", in host memory.
//
// Kernels run at once, on the CPU, so that results are the CPU's, bit for bit. What a real device does later, or at the
// same time, is written down in the order in which it is launched: the bytes that each kernel reads and writes and its
// stream, events, waits, allocations and frees. ordering.py then decides what nothing puts in order. So what is found
// depends neither on chance nor on timing.
//
// Nothing here needs Python's headers: the library is loaded with torch.ops.load_library.

#include "operators.h"

#include "autocast.h"
#include "calls.h"
#include "collectives.h"
#include "guard.h"
