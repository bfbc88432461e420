/* Threads that do the same work at once on the CPUs of one device, to measure it. */
#ifndef EVEN_DEVICE_CPU_CREW_H
#define EVEN_DEVICE_CPU_CREW_H

#include "device/device.h"

/* Runs body(context, index) on `threads` threads, all bound to the device's CPUs, and waits for them. Nothing of a
 * thread outlives the call. Errors: EVEN_ERR_MEMORY, EVEN_ERR_SYSTEM (a thread could not start; none ran the body then,
 * or those that did have ended). */
even_status even_crew_run(const even_device *device, size_t threads, void (*body)(void *context, size_t index),
                          void *context) EVEN_MUST_USE;

#endif
