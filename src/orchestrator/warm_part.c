/* An agent's places for the next attempt. */
#include "orchestrator/warm_part.h"

#include "base/fail.h"
#include "base/json_writer.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/legacy.h"
#include "os/socket.h"

#include <signal.h>

void even_warm_part_close(even_warm_part *part) {
  even_warm_close(part->warm);
  even_device_list_free(&part->own);
  *part = (even_warm_part){.warm = NULL};
}

static void say_devices(const even_warm_part *part, even_text *out) {
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "number", part->number);
  even_host_facts_add_devices(&json, &part->own);
  even_json_object_end(&json);
}

/* Why it cannot be. */
static void say_error(const even_warm_part *part, even_text *out) {
  const even_error *error = even_error_last();
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "number", part->number);
  even_json_integer(&json, "status", error->status);
  even_json_string(&json, "what", error->what);
  even_json_string(&json, "fix", error->fix);
  even_json_object_end(&json);
  even_error_clear();
}

static even_status start(even_warm_part *part, even_loop *loop, const char *interface, uint64_t descriptors,
                         const even_legacy *legacy, const even_remote_start *start) {
  const even_warm_params params = {.loop = loop,
                                   .place = {.first = start->first,
                                             .local = start->count,
                                             .group = start->group,
                                             .groups = start->groups,
                                             .era = start->era,
                                             .keeper = even_legacy_keeper(start->outlast_seconds > 0 ? legacy : NULL),
                                             .master_address = start->master_address,
                                             .interface = interface,
                                             .master_port = start->master_port,
                                             .attempt = start->attempt,
                                             .silence_ms = even_socket_silence(),
                                             .max_restarts = start->max_restarts,
                                             .telemetry_fd = -1,
                                             .snapshot_fd = -1,
                                             .generation_fd = -1,
                                             .job = start->job,
                                             .run_folder = start->run_folder},
                                   .own = &part->own,
                                   .world = (size_t)start->world,
                                   .command = start->command,
                                   .environment = start->environment,
                                   .unpinned = start->unpinned,
                                   .descriptors = descriptors,
                                   .ignored = start->notice_seconds > 0 ? SIGUSR1 : 0};
  return even_warm_start(&params, &part->warm);
}

/* Processes that cannot be started beforehand are started when their attempt begins. */
static even_status prepare(even_warm_part *part, even_loop *loop, const char *interface, uint64_t descriptors,
                           const even_legacy *legacy, const json_t *content, const even_remote_start *begins) {
  EVEN_TRY(even_device_select(NULL, begins->count, &part->own));
  if (json_is_true(json_object_get(content, "warm")) &&
      start(part, loop, interface, descriptors, legacy, begins) != EVEN_OK) {
    even_error_clear();
  }
  part->waits = true;
  return EVEN_OK;
}

even_status even_warm_part_hear(even_warm_part *part, even_loop *loop, const char *interface, uint64_t descriptors,
                                const even_legacy *legacy, const json_t *content, even_text *answer) {
  const json_t *begins = json_object_get(content, "part");
  even_remote_start read = {.job = ""};
  even_warm_part_close(part);
  part->number = json_integer_value(json_object_get(content, "number"));
  if (begins == NULL) {
    return EVEN_OK; /* nothing comes of it */
  }
  even_status status = even_remote_start_of(begins, &read);
  if (status == EVEN_OK && prepare(part, loop, interface, descriptors, legacy, content, &read) == EVEN_OK) {
    say_devices(part, answer);
  } else if (status == EVEN_OK) {
    say_error(part, answer);
  }
  even_remote_start_free(&read);
  return status;
}

bool even_warm_part_says(even_warm_part *part, even_text *answer) {
  if (!part->waits || (part->warm != NULL && even_warm_settled(part->warm) < part->own.count)) {
    return false;
  }
  size_t waiting = part->warm == NULL ? 0 : part->own.count - even_warm_lost(part->warm);
  part->waits = false;
  even_text_format(answer, "{\"number\":%lld,\"waiting\":%zu}", (long long)part->number, waiting);
  return true;
}

void even_warm_part_begins(even_warm_part *part, size_t count, even_device_list *own) {
  if (part->own.count == count && own->count != count) {
    even_device_list_free(own);
    *own = part->own;
    part->own = (even_device_list){NULL, 0};
  }
}
