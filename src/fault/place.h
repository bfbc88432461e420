/* What an exception says of the place where it was raised: a device that is broken, a driver, a disk. Pure. */
#ifndef EVEN_FAULT_PLACE_H
#define EVEN_FAULT_PLACE_H

#include "fault/traceback.h"

typedef enum even_place_blame {
  EVEN_PLACE_SPARED,  /* it says nothing of it: an error of the script's, or for lack of another rank */
  EVEN_PLACE_SUSPECT, /* the place may have failed, or the script in native code (an illegal address, say) */
  EVEN_PLACE_BROKEN   /* the device is broken, lost, or in another's hands */
} even_place_blame;

/* By the words of CUDA, HIP, XPU and their libraries, of torch's workers and of the system. What a kernel asserts of
 * its input, and lack of memory (even_traceback_is_of_memory), say nothing of the place. */
even_place_blame even_traceback_blames_place(const even_traceback *traceback);

#endif
