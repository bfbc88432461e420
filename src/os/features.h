/* What this kernel lets an ordinary process do; tried, not guessed from its version. */
#ifndef EVEN_OS_FEATURES_H
#define EVEN_OS_FEATURES_H

#include <stdbool.h>
#include <stddef.h>

bool even_feature_pidfd(void); /* pidfd_open (5.3): processes are watched without races over their numbers */
/* Memory that processes share: memfd_create, ftruncate, mmap. `folder`: "", or where a file is taken instead. */
bool even_feature_shared_memory(char *folder, size_t bytes);

#endif
