/* Notice that a host must end soon, kept until somebody can be told, or ranks run. */
#ifndef EVEN_ORCHESTRATOR_HOST_NOTICE_H
#define EVEN_ORCHESTRATOR_HOST_NOTICE_H

#include <stdint.h>

enum { EVEN_HOST_NOTICE_WORDS = 192 };

typedef struct even_host_notice {
  int signal; /* as of even_notice (job.h); 0: there is none */
  double seconds;
  char what[EVEN_HOST_NOTICE_WORDS];
  uint64_t at_ns;
} even_host_notice;

#endif
