/* What `make test` may not go without: EVENSTEP_TEST_REQUIRE, words with commas between them (ucx, mpi, namespaces). */
#ifndef EVEN_TESTS_SUPPORT_REQUIRED_H
#define EVEN_TESTS_SUPPORT_REQUIRED_H

#include <stdbool.h>

/* Whether the variable has the word; then `why` the test would have been skipped is printed, and it is to fail. */
bool required(const char *word, const char *why);

#endif
