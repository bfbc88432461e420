/* Any bytes as a table of communication costs: an error, or a table that can be written and read again; never a crash.
 */
#include "comm/costs.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static size_t count_of(even_comm_costs *costs) {
  even_comm_cost cost;
  size_t count = 0;
  while (even_comm_costs_at(costs, count, &cost)) {
    count++;
  }
  return count;
}

/* As a file has it: a text with a NUL behind it. */
static void read_and_write(const char *text, size_t size) {
  even_comm_costs *costs = NULL;
  even_comm_costs *again = NULL;
  even_text written = EVEN_TEXT_EMPTY;
  if (even_comm_costs_open(&costs) != EVEN_OK || even_comm_costs_open(&again) != EVEN_OK) {
    abort();
  }
  even_status status = even_comm_costs_read(costs, "fuzz", text, size, 0);
  if (status != EVEN_OK && (status != EVEN_ERR_INPUT || count_of(costs) != 0)) {
    abort();
  }
  even_comm_costs_write(costs, &written);
  if (even_comm_costs_read(again, "written", even_text_string(&written), written.length, 0) != EVEN_OK ||
      count_of(again) != count_of(costs)) {
    abort();
  }
  even_text_free(&written);
  even_comm_costs_close(costs);
  even_comm_costs_close(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char *text = malloc(size + 1);
  if (text == NULL) {
    return 0;
  }
  memcpy(text, data, size);
  text[size] = '\0';
  read_and_write(text, size);
  free(text);
  return 0;
}
