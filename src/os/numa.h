/* NUMA nodes: which one CPUs are of, and from which one the pages of a mapping are taken. */
#ifndef EVEN_OS_NUMA_H
#define EVEN_OS_NUMA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum even_numa_answer {
  EVEN_NUMA_ONE,    /* no more than one node has memory, or none is known: there is nothing to choose */
  EVEN_NUMA_FOUND,  /* all of the CPUs are of one node, which has memory */
  EVEN_NUMA_SEVERAL /* they are not */
} even_numa_answer;

/* The node of all CPUs of a mask (a bit each, 64 a word) by /sys, *node; -1 unless it was FOUND. */
even_numa_answer even_numa_of_cpus(const uint64_t *cpus, size_t words, int *node);
/* Whether the calling thread takes its pages by a policy that somebody set (numactl, set_mempolicy(2)). An errno where
 * the kernel does not say; 0. */
int even_numa_has_policy(bool *out);
/* Pages that are not taken yet are taken from `node` as long as it has some, whoever writes to them first: of shared
 * memory, for all who map it. Whole pages between the two ends; they must be mapped. An errno where the kernel refuses
 * (containers often do); 0. */
int even_numa_prefer(void *address, size_t bytes, int node);

#endif
