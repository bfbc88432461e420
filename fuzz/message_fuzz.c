/* What agents of other hosts say, byte by byte: messages, and the JSON in those that start an attempt. */
#include "orchestrator/message.h"
#include "orchestrator/parcel_wire.h"
#include "orchestrator/remote_start.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  size_t at = 0;
  size_t used = 0;
  size_t wanted = 0;
  even_message message;
  while (even_message_next(data + at, size - at, &message, &used, &wanted) == EVEN_OK && used > 0) {
    even_remote_start start;
    if (used > size - at || wanted != used || message.json_bytes + message.data_bytes + EVEN_MESSAGE_HEAD != used ||
        message.data_bytes > even_message_most_data(message.kind)) {
      abort();
    }
    if (even_remote_start_read(message.json, message.json_bytes, &start) == EVEN_OK &&
        (start.first + start.count > start.world || start.command[0] == NULL || start.group >= start.groups)) {
      abort();
    }
    even_remote_start_free(&start);
    even_parcel_note note;
    if (even_parcels_know(message.kind) && even_parcel_note_read(&message, 8, &note) == EVEN_OK &&
        (note.parcel.to < 0 || note.parcel.to >= 8 || note.parcel.from < 0 || note.parcel.from >= 8 || note.host >= 8 ||
         note.parcel.bytes > INT64_MAX || note.at > INT64_MAX)) {
      abort();
    }
    at += used;
  }
  return 0;
}
