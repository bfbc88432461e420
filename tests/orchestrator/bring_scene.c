/* Three hosts of a job whose copies come back. */
#include "orchestrator/bring_scene.h"

#include "base/alloc.h"
#include "base/json_reader.h"
#include "base/stop.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "orchestrator/copies.h"
#include "orchestrator/elastic.h"
#include "orchestrator/host_memory.h"
#include "support/clock_ahead.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

enum { STILL_TICKS = 2 };

#define SECOND_NS UINT64_C(1000000000)

bring_scene at;

/* ---- the hosts ---- */

static even_status hears(struct star *of, int self, int other, const even_message *message) {
  json_t *content = NULL;
  (void)of;
  if (self != 0 && message->kind == EVEN_MESSAGE_ESTATE) {
    even_text_clear(&at.sides[self].estate);
    even_text_append(&at.sides[self].estate, message->json, message->json_bytes);
    return EVEN_OK;
  }
  if (self != 0 && (message->kind != EVEN_MESSAGE_SEEK || at.sides[self].deaf)) {
    return EVEN_OK;
  }
  even_status status = even_json_parse("a message", message->json, message->json_bytes, &content);
  if (status == EVEN_OK && self == 0) {
    status = even_bring_back_hear(&at.agents[other], content);
  } else if (status == EVEN_OK) {
    if (json_object_get(content, "folders") != NULL) { /* each looks at a disk of its own */
      json_t *folders = json_array();
      (void)json_array_append_new(folders, json_string(at.sides[self].disk));
      (void)json_object_set_new(content, "folders", folders);
    }
    status = even_bring_give_hear(at.sides[self].give, content);
  }
  json_decref(content);
  return status;
}

static void loses(struct star *of, int self, int other) {
  (void)of;
  if (self == 0) {
    at.agents[other].link = NULL;
    (void)snprintf(at.agents[other].lost_words, sizeof at.agents[other].lost_words, "%.300s",
                   even_link_why(&at.star.hosts[0].ends[other].link)->what);
  }
}

static void tell(void *context, even_text *text) {
  const bring_side *from = context;
  int self = (int)(from - at.sides);
  (void)!even_link_send_text(&at.star.hosts[self].ends[0].link, EVEN_MESSAGE_FOUND, text, NULL, 0);
}

/* ---- the leader ---- */

static void notice(void *context, const char *text) {
  (void)context;
  size_t used = strlen(at.notices);
  (void)snprintf(at.notices + used, sizeof at.notices - used, "%s\n", text);
}

static void disturb(void) {
  star_host *leader = &at.star.hosts[0];
  if (at.dies_after > 0 && leader->pieces >= (uint64_t)at.dies_after) {
    at.dies_after = 0;
    even_link_close(&at.star.hosts[2].ends[0].link);
  }
  if (at.voter != NULL && leader->pieces >= (uint64_t)at.superseded_from) {
    at.hosts.voter = at.voter;
  }
  if (at.alters_from > 0 && leader->pieces + 1 >= (uint64_t)at.alters_from) {
    at.alters_from = 0;
    leader->alters = true;
  }
}

/* Between the leader's own: the hosts' turns, and time where nothing moves. */
static void tick(void *context) {
  (void)context;
  disturb();
  for (int i = 1; i < STAR_HOSTS; i++) {
    if (at.star.hosts[i].ends[0].link.fd >= 0) {
      even_link_tick(&at.star.hosts[i].ends[0].link, false);
    }
    even_parcels_tick(at.star.hosts[i].parcels);
  }
  at.still = at.star.moved == at.moved ? at.still + 1 : 0;
  at.moved = at.star.moved;
  if (at.still >= STILL_TICKS) {
    clock_ahead_add(20 * SECOND_NS);
  }
}

static void open_leader(void) {
  at.params = (even_agent_params){.checkpoint_folder = at.folder, .observer = {.notice = notice, .tick = tick}};
  at.job = (even_job){.params = &at.params, .hosts = &at.hosts, .id = JOB};
  even_text_add(&at.job.run_folder, scratch_path("run"));
  at.hosts = (even_hosts){.agents = at.agents,
                          .count = STAR_HOSTS,
                          .room = STAR_HOSTS,
                          .loop = at.star.loop,
                          .parcels = at.star.hosts[0].parcels,
                          .listener = -1,
                          .job = &at.job,
                          .listener_watch = {.fd = 0}, /* nobody else comes */
                          .params = {.copies = 1, .memory_copies = 1}};
  assert_int_equal(even_elastic_open(&at.hosts), EVEN_OK);
  for (size_t i = 0; i < STAR_HOSTS; i++) {
    at.agents[i] = (even_host_agent){.hosts = &at.hosts,
                                     .index = i,
                                     .fits = i > 0,
                                     .shell = {.pid = -1},
                                     .input = -1,
                                     .watches = {{.fd = -1}, {.fd = -1}}};
    at.agents[i].link = i > 0 ? &at.star.hosts[0].ends[i].link : NULL;
    (void)snprintf(at.agents[i].name, sizeof at.agents[i].name, "host%zu", i);
  }
}

static void open_scene(void) {
  memset(&at, 0, sizeof at);
  assert_int_equal(star_open(&at.star), EVEN_OK);
  at.star.hears = hears;
  at.star.loses = loses;
  at.star.ends_expected = true;
  (void)snprintf(at.folder, sizeof at.folder, "%s", scratch_path("leader"));
  for (int i = 1; i < STAR_HOSTS; i++) {
    char name[16];
    (void)snprintf(name, sizeof name, "disk%d", i);
    (void)snprintf(at.sides[i].disk, sizeof at.sides[i].disk, "%s", scratch_path(name));
    assert_int_equal(
        even_bring_give_open(at.star.hosts[i].parcels, &at.sides[i].kept, tell, &at.sides[i], &at.sides[i].give),
        EVEN_OK);
  }
  open_leader();
}

static void close_scene(void) {
  for (int i = 1; i < STAR_HOSTS; i++) {
    even_bring_give_close(at.sides[i].give);
    at.sides[i].give = NULL;
  }
  star_close(&at.star);
  for (int i = 1; i < STAR_HOSTS; i++) {
    even_bring_kept_free(&at.sides[i].kept);
    even_text_free(&at.sides[i].estate);
  }
  even_host_memory_close(at.params.memory);
  even_copies_close(at.hosts.copies);
  even_elastic_close(&at.hosts);
  even_free(at.hosts.elastic);
  even_text_free(&at.job.run_folder);
  even_stop_when(NULL);
}

void bring_scene_begin_anew(void) {
  close_scene();
  open_scene();
}

int bring_scene_set_up(void **state) {
  if (scratch_make(state) != 0) {
    return -1;
  }
  open_scene();
  return 0;
}

int bring_scene_tear_down(void **state) {
  close_scene();
  fault_reset();
  (void)unsetenv("EVENSTEP_MEMORY_DIR");
  return scratch_remove(state);
}

/* ---- checkpoints ---- */

void bring_scene_save_of(const char *folder, int step, const char *job, const char *lineage) {
  even_checkpoint_tensor tensors[3];
  even_checkpoint_writer *writer = NULL;
  char path[256];
  char state[320];
  (void)mkdir(folder, 0700); /* or it is there */
  (void)snprintf(path, sizeof path, "%s/step-%d", folder, step);
  const even_checkpoint_params params = {.size = sizeof params, .folder = path};
  const even_checkpoint_file file = {
      .size = sizeof file, .name = "model.safetensors", .tensors = tensors, .tensor_count = 3};
  sample_tensors(tensors, step);
  (void)snprintf(state, sizeof state, "{\"step\": %d, \"job\": \"%s\", \"lineage\": \"%s\", \"order\": [1, 0, %d]}",
                 step, job, lineage, step);
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_commit(writer, state), EVEN_OK);
}

void bring_scene_save(const char *folder, int step) {
  bring_scene_save_of(folder, step, JOB, LINEAGE);
}

void bring_scene_read_order(const char *folder, int step, char out[64]) {
  char path[256];
  even_checkpoint_info info;
  (void)snprintf(path, sizeof path, "%s/step-%d", folder, step);
  assert_int_equal(even_checkpoint_inspect(path, &info), EVEN_OK);
  (void)snprintf(out, 64, "%s", info.order);
  even_checkpoint_info_free(&info);
}

/* ---- looking ---- */

even_bring_back_wish bring_scene_wish(void) {
  return (even_bring_back_wish){.after = at.after, .job = JOB, .lineage = "", .until = "", .trained = true};
}

even_status bring_scene_look(const even_bring_back_wish *wish, char **path) {
  even_status status = even_bring_back_newest(&at.job, wish, path);
  assert_true(status == EVEN_OK || *path == NULL);
  assert_null(at.hosts.back);
  return status;
}

void bring_scene_assert_brings(const even_bring_back_wish *wish, const char *place) {
  char *path = NULL;
  assert_int_equal(bring_scene_look(wish, &path), EVEN_OK);
  if (place == NULL) {
    assert_null(path);
    return;
  }
  assert_non_null(path);
  assert_string_equal(path, place);
  assert_int_equal(even_checkpoint_verify(path, NULL), EVEN_OK);
  even_free(path);
}

bool bring_scene_was_told(const char *words) {
  return strstr(at.notices, words) != NULL;
}
