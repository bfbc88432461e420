/* How much memory and swap a host has. */
#ifndef EVEN_DEVICE_MEMORY_FACTS_H
#define EVEN_DEVICE_MEMORY_FACTS_H

#include "device/source.h"

typedef struct even_memory_facts {
  uint64_t total_bytes, available_bytes;
  uint64_t swap_total_bytes, swap_free_bytes;
  uint64_t huge_page_bytes; /* reserved, of the default size */
} even_memory_facts;

/* From /proc/meminfo; what it does not say stays 0. Errors: EVEN_ERR_MEMORY. */
even_status even_memory_facts_read(const even_device_source *source, even_memory_facts *out) EVEN_MUST_USE;

#endif
