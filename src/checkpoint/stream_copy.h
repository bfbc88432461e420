/* Copies that leave the caches to others. */
#ifndef EVEN_CHECKPOINT_STREAM_COPY_H
#define EVEN_CHECKPOINT_STREAM_COPY_H

#include <stddef.h>

/* As memcpy, for what nobody reads soon: the target's lines are written without being read first, where the processor
 * can do that. */
void even_stream_copy(void *to, const void *from, size_t bytes);

#endif
