/* A made-up NVTX that keeps what it is told, and checks that ranges are closed as they were opened. */
#ifndef EVEN_TEST_FAKE_NVTX_H
#define EVEN_TEST_FAKE_NVTX_H

#include <stddef.h>

/* "+all_reduce 8 bytes", "-" of each push and pop, "<data" and ">data" of each start and end; in the order of the
 * calls. */
size_t fake_nvtx_calls(void);
const char *fake_nvtx_call(size_t number);
/* What was wrong first, NULL where nothing was. Ranges still open are, too. */
const char *fake_nvtx_violation(void);
void fake_nvtx_reset(void);

#endif
