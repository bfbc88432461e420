/* Copies that come back: a leader that lacks its checkpoints, or has older ones, and two hosts that keep some. */
#include "orchestrator/bring_back.h"

#include "base/alloc.h"
#include "base/json_reader.h"
#include "base/stop.h"
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "orchestrator/bring.h"
#include "orchestrator/bring_scene.h"
#include "orchestrator/copies.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/resume.h"
#include "orchestrator/voter.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/listener.h"
#include "os/signals.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- what is to hold ---- */

static void the_newest_of_all_hosts_comes_back(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  bring_scene_save(at.sides[1].disk, 2);
  bring_scene_save(at.sides[2].disk, 1);
  bring_scene_save(at.sides[2].disk, 3);
  bring_scene_assert_brings(&wish, scratch_path("leader/step-3"));
  assert_true(bring_scene_was_told("host host2 has step-3, newer than all that is whole here: it is brought back"));
  assert_true(bring_scene_was_told("step-3 was brought back from host host2 in "));
  assert_true(scratch_has("disk2/step-3") && scratch_has("disk2/step-1")); /* what is given stays */
  assert_false(scratch_has("leader/step-2"));
}

/* "step-N" of two files, of which one may be that of other steps. */
static void save_with_frozen(const char *folder, int frozen, int step) {
  static const char *const names[] = {"frozen.safetensors", "model.safetensors"};
  even_checkpoint_tensor tensors[3];
  even_checkpoint_writer *writer = NULL;
  char path[256];
  char state[320];
  (void)mkdir(folder, 0700); /* or it is there */
  (void)snprintf(path, sizeof path, "%s/step-%d", folder, step);
  const even_checkpoint_params params = {.size = sizeof params, .folder = path};
  (void)snprintf(state, sizeof state, "{\"step\": %d, \"job\": \"%s\", \"order\": [1, 0, %d]}", step, JOB, step);
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  for (size_t i = 0; i < 2; i++) {
    const even_checkpoint_file file = {.size = sizeof file, .name = names[i], .tensors = tensors, .tensor_count = 3};
    sample_tensors(tensors, i == 0 ? frozen : step);
    assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_OK);
  }
  assert_int_equal(even_checkpoint_writer_commit(writer, state), EVEN_OK);
}

/* What is here stays; so many pieces come of the next one, which host 1 has: each file is one. */
static void share(uint64_t pieces) {
  char here[256];
  even_bring_back_wish wish = bring_scene_wish();
  (void)snprintf(here, sizeof here, "%s/step-2", at.folder);
  bring_scene_read_order(at.folder, 2, at.after);
  wish.here = here;
  bring_scene_assert_brings(&wish, scratch_path("leader/step-3"));
  assert_int_equal(at.star.hosts[0].pieces, pieces);
  assert_true(scratch_has("leader/step-2/frozen.safetensors"));
  assert_false(bring_scene_was_told("could not be brought back"));
}

static void what_has_not_changed_is_not_sent(void **state) {
  struct stat facts;
  (void)state;
  save_with_frozen(at.folder, 1, 2);
  save_with_frozen(at.sides[1].disk, 1, 3);
  share(2); /* the manifest, and the other file */
  assert_int_equal(stat(scratch_path("leader/step-3/frozen.safetensors"), &facts), 0);
  assert_int_equal(facts.st_nlink, 2);
  assert_true(bring_scene_was_told(" MB of it were here already)"));
}

/* It has been damaged since it was read: nothing is wrong with the host's. */
static void what_is_shared_and_damaged_comes_as_the_rest(void **state) {
  (void)state;
  save_with_frozen(at.folder, 1, 2);
  save_with_frozen(at.sides[1].disk, 1, 3);
  scratch_flip("leader/step-2/frozen.safetensors", scratch_size("leader/step-2/frozen.safetensors") - 1, 0);
  share(2 + 3); /* and then all */
  assert_false(bring_scene_was_told("already"));
}

static void what_is_no_newer_stays_where_it_is(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  bring_scene_save(at.sides[1].disk, 3);
  bring_scene_save(at.sides[2].disk, 2);
  bring_scene_save(at.folder, 3);
  bring_scene_read_order(at.folder, 3, at.after);
  bring_scene_assert_brings(&wish, NULL);
  assert_string_equal(at.notices, "");
  bring_scene_save(at.sides[1].disk, 4);
  bring_scene_assert_brings(&wish, scratch_path("leader/step-4"));
}

/* Of another job: none. What the training had before the job began: up to then. Anybody's: all. */
static void only_what_the_job_may_go_on_from_comes(void **state) {
  (void)state;
  char until[64];
  even_bring_back_wish wish = bring_scene_wish();
  bring_scene_save_of(at.sides[1].disk, 2, OTHER_JOB, LINEAGE);
  bring_scene_save_of(at.sides[1].disk, 3, OTHER_JOB, LINEAGE);
  bring_scene_save_of(at.sides[2].disk, 4, OTHER_JOB, OTHER_LINEAGE);
  bring_scene_assert_brings(&wish, NULL);
  bring_scene_read_order(at.sides[1].disk, 2, until);
  wish.lineage = LINEAGE;
  wish.until = until;
  bring_scene_assert_brings(&wish, scratch_path("leader/step-2"));
  wish.until = "";
  bring_scene_assert_brings(&wish, scratch_path("leader/step-3"));
  wish.any = true;
  bring_scene_assert_brings(&wish, scratch_path("leader/step-4"));
}

static void a_damaged_copy_is_told_and_the_next_best_is_taken(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  bring_scene_save(at.sides[1].disk, 2);
  bring_scene_save(at.sides[2].disk, 3);
  scratch_flip("disk2/step-3/model.safetensors", scratch_size("disk2/step-3/model.safetensors") - 1, 0);
  bring_scene_assert_brings(&wish, scratch_path("leader/step-2"));
  assert_true(bring_scene_was_told("warning: step-3 could not be brought back from host host2: "));
  assert_true(bring_scene_was_told("is altered"));
  assert_false(scratch_has("leader/step-3") || scratch_has("leader/step-3" EVEN_CHECKPOINT_PARTIAL));
}

static size_t times_told(const char *words) {
  size_t times = 0;
  for (const char *found = strstr(at.notices, words); found != NULL; found = strstr(found + 1, words)) {
    times++;
  }
  return times;
}

/* As rsync does it, file by file. */
static void copy_folder(const char *from, const char *to) {
  even_names names = {NULL, 0};
  assert_int_equal(even_folder_make(to), EVEN_OK);
  assert_int_equal(even_folder_names(from, &names), EVEN_OK);
  for (size_t i = 0; i < names.count; i++) {
    char path[256];
    even_text content = EVEN_TEXT_EMPTY;
    (void)snprintf(path, sizeof path, "%s/%s", from, names.items[i]);
    assert_int_equal(even_file_read(path, SIZE_MAX, &content), EVEN_OK);
    (void)snprintf(path, sizeof path, "%s/%s", to, names.items[i]);
    assert_int_equal(even_file_replace(path, content.data, content.length), EVEN_OK);
    even_text_free(&content);
  }
  even_names_free(&names);
}

/* A copy on another disk is another one. */
static void what_hosts_see_in_common_is_looked_at_once(void **state) {
  static const char words[] = "could not be brought back";
  (void)state;
  at.params.checkpoint_folder = at.sides[1].disk; /* the leader sees it, too */
  at.params.resume = "auto";
  bring_scene_save(at.sides[1].disk, 3);
  scratch_flip("disk1/step-3/model.safetensors", scratch_size("disk1/step-3/model.safetensors") - 1, 0);
  (void)snprintf(at.sides[2].disk, sizeof at.sides[2].disk, "%s", at.sides[1].disk);
  for (int restart = 0; restart <= 1; restart++) {
    at.notices[0] = '\0';
    assert_int_equal(even_job_find_resume(&at.job, restart), EVEN_ERR_CORRUPT);
    assert_non_null(strstr(even_error_last()->what, "none of the 1 checkpoints in "));
    assert_int_equal(times_told(words), 1);
  }
  at.params.checkpoint_folder = at.folder; /* or does not: */
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_CORRUPT);
  assert_non_null(strstr(even_error_last()->what, "for those of other hosts are damaged: host host"));
  (void)snprintf(at.sides[2].disk, sizeof at.sides[2].disk, "%s", scratch_path("disk2"));
  copy_folder(scratch_path("disk1/step-3"), scratch_path("disk2/step-3"));
  at.notices[0] = '\0';
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_CORRUPT);
  assert_int_equal(times_told(words), 2);
}

static void damage_on_the_way_is_found(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  bring_scene_save(at.sides[1].disk, 2);
  bring_scene_save(at.sides[2].disk, 3);
  for (int piece = 1; piece <= 2; piece++) { /* of the manifest, of the tensors */
    char *path = NULL;
    at.star.hosts[0].pieces = 0;
    at.alters_from = piece;
    assert_int_equal(bring_scene_look(&wish, &path), EVEN_OK);
    assert_string_equal(path, scratch_path("leader/step-2"));
    assert_int_equal(even_checkpoint_verify(path, NULL), EVEN_OK);
    even_free(path);
    assert_int_equal(even_checkpoint_remove(scratch_path("leader/step-2")), EVEN_OK);
    assert_false(scratch_has("leader/step-3") || scratch_has("leader/step-3" EVEN_CHECKPOINT_PARTIAL));
  }
}

static void a_host_that_is_lost_in_the_midst_leaves_the_next_best(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  bring_scene_save(at.sides[1].disk, 2);
  bring_scene_save(at.sides[2].disk, 3);
  at.dies_after = 1;
  bring_scene_assert_brings(&wish, scratch_path("leader/step-2"));
  assert_true(bring_scene_was_told("warning: step-3 could not be brought back from host host2: "));
  assert_false(scratch_has("leader/step-3") || scratch_has("leader/step-3" EVEN_CHECKPOINT_PARTIAL));
}

/* Nothing is begun anew where it was the only one that has a copy; with something here the job goes on from that. */
static void the_only_copy_that_does_not_come_is_named(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  char *path = NULL;
  bring_scene_save(at.sides[2].disk, 3);
  at.dies_after = 1;
  assert_int_equal(bring_scene_look(&wish, &path), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "it is not begun anew, for host host2 has a copy of step-3 ("));
  assert_non_null(strstr(even_error_last()->what, "which could not be brought back: "));
  assert_non_null(strstr(even_error_last()->fix, "rsync -a host2:"));
}

static int full_disk(const char *path, struct statvfs *out) {
  int status = even_os_real.statvfs(path, out);
  out->f_bavail = 0;
  return status;
}

static void no_room_is_seen_before_anything_is_taken(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  char *path = NULL;
  bring_scene_save(at.sides[2].disk, 3);
  even_os.statvfs = full_disk;
  assert_int_equal(bring_scene_look(&wish, &path), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "where 0 are free"));
  assert_int_equal(at.star.hosts[0].pieces, 1); /* the manifest's */
  bring_scene_save(at.folder, 1);
  bring_scene_read_order(at.folder, 1, at.after);
  bring_scene_assert_brings(&wish, NULL);
  assert_true(bring_scene_was_told("warning: step-3 could not be brought back from host host2: a checkpoint of "));
  even_os.statvfs = even_os_real.statvfs;
  bring_scene_assert_brings(&wish, scratch_path("leader/step-3"));
}

/* A host that lives, and does not answer, is waited for for a minute. */
static void a_host_that_does_not_answer_is_not_waited_for_without_end(void **state) {
  (void)state;
  even_bring_back_wish wish = bring_scene_wish();
  char *path = NULL;
  at.sides[2].deaf = true;
  assert_int_equal(bring_scene_look(&wish, &path), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->what,
                         "host host2, which was asked for its copies, may have one, but it did "
                         "not answer within 60 s"));
  wish.trained = false; /* there is nothing to lose */
  bring_scene_assert_brings(&wish, NULL);
  bring_scene_save(at.sides[1].disk, 2);
  bring_scene_assert_brings(&wish, scratch_path("leader/step-2"));
  bring_scene_read_order(at.folder, 2, at.after);
  bring_scene_assert_brings(&wish, NULL);
  assert_true(
      bring_scene_was_told("warning: host host2 may have a newer checkpoint than this one, but it did not answer"));
}

static even_status fetch(void *context, const even_agent_wish *wish, char **path) {
  (void)wish;
  return context == NULL ? EVEN_OK : even_duplicate(context, path);
}

static void what_hosts_cannot_give_another_place_may(void **state) {
  (void)state;
  at.sides[2].deaf = true;
  at.params.elsewhere = (even_agent_elsewhere){.kept = true, .fetch = fetch};
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_PEER_LOST);
  bring_scene_save(scratch_path("far"), 1);
  at.params.elsewhere.context = (void *)scratch_path("far/step-1");
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_OK);
  assert_true(bring_scene_was_told("the job goes on from what another place had"));
  even_text_free(&at.job.resume);
}

/* Of one that votes alone, a newer generation than the leader's. */
static even_voter *open_voter(void) {
  enum { ONE = 1 };
  int port = 0;
  even_voter *voter = NULL;
  even_voter_view view;
  even_voter_member self = {.id = ONE};
  even_voter_params params = {.size = sizeof params, .self = ONE, .members = &self, .count = 1, .first = ONE};
  assert_int_equal(even_listener_open("127.0.0.1", &port, &params.listener), EVEN_OK);
  (void)snprintf(self.address, sizeof self.address, "127.0.0.1:%d", port);
  assert_int_equal(even_voter_open(&params, &voter), EVEN_OK);
  for (even_voter_look(voter, &view); view.newest.generation == 0; even_voter_look(voter, &view)) {
    even_clock_sleep_ns(1000000);
  }
  return voter;
}

static even_status fetch_nothing(void *context, const even_agent_wish *wish, char **path) {
  (void)wish;
  (void)path;
  *(bool *)context = true;
  return EVEN_OK;
}

/* Neither by asking, nor in the midst of a checkpoint that comes; nor is it looked for elsewhere. */
static void a_leader_in_whose_place_another_one_leads_ends(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  char *path = NULL;
  bool fetched = false;
  if (even_voter_library() == NULL) {
    skip();
  }
  at.params.elsewhere = (even_agent_elsewhere){.kept = true, .fetch = fetch_nothing, .context = &fetched};
  bring_scene_save(at.sides[1].disk, 2);
  bring_scene_save(at.sides[2].disk, 3);
  at.voter = open_voter();
  for (at.superseded_from = 0; at.superseded_from <= 1; at.superseded_from++) {
    at.hosts.voter = NULL;
    assert_int_equal(bring_scene_look(&wish, &path), EVEN_ERR_PEER_LOST);
    assert_non_null(strstr(even_error_last()->what, "leads this job since generation 1"));
    assert_false(scratch_has("leader/step-2") || scratch_has("leader/step-3"));
  }
  at.hosts.voter = NULL;
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_PEER_LOST);
  assert_false(fetched);
  even_voter_close(at.voter, true);
  at.hosts.voter = at.voter = NULL;
}

static bool stops(void) {
  return at.stops;
}

static void whoever_ends_the_job_need_not_wait(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  char *path = NULL;
  at.sides[2].deaf = true;
  at.stops = true;
  even_stop_when(stops);
  assert_int_equal(bring_scene_look(&wish, &path), EVEN_ERR_INTERRUPTED);
}

/* A damaged one here of the same name gives way to the whole one; another checkpoint keeps its name. */
static void names_that_are_taken_here(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  char *path = NULL;
  bring_scene_save(at.sides[1].disk, 3);
  bring_scene_save(at.folder, 3);
  /* the same training at the same time writes the same manifest but for `created` */
  assert_int_equal(bring_scene_look(&wish, &path), EVEN_OK);
  assert_non_null(strstr(path, "leader/step-3-"));
  assert_int_equal(even_checkpoint_verify(path, NULL), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("leader/step-3"), NULL), EVEN_OK);
  assert_int_equal(even_checkpoint_remove(scratch_path("leader/step-3")), EVEN_OK);
  assert_int_equal(rename(path, scratch_path("leader/step-3")), 0);
  even_free(path);
  scratch_flip("leader/step-3/model.safetensors", scratch_size("leader/step-3/model.safetensors") - 1, 0);
  bring_scene_assert_brings(&wish, scratch_path("leader/step-3"));
}

/* ---- memory ---- */

static void open_memories(bool leader) {
  assert_int_equal(setenv("EVENSTEP_MEMORY_DIR", scratch, 1), 0);
  assert_int_equal(even_host_memory_open(&at.sides[1].kept.host), EVEN_OK);
  if (leader) {
    assert_int_equal(even_host_memory_open(&at.params.memory), EVEN_OK);
  }
  bring_scene_save(even_text_string(&at.sides[1].kept.host->folder), 3);
}

static void what_lies_in_memory_comes_to_memory(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  char place[256];
  open_memories(true);
  bring_scene_save(at.sides[2].disk, 2);
  (void)snprintf(place, sizeof place, "%s/step-3", even_text_string(&at.params.memory->folder));
  bring_scene_assert_brings(&wish, place);
  assert_true(bring_scene_was_told("host host1 has step-3 in its memory"));
}

static void to_the_disk_where_there_is_no_memory_for_it(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  open_memories(false);
  bring_scene_assert_brings(&wish, scratch_path("leader/step-3"));
}

/* Nothing is left there to be copied by hand once the job has ended. */
static void the_only_copy_in_a_memory_is_said_to_go_with_the_job(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  char *path = NULL;
  open_memories(false);
  even_os.statvfs = full_disk;
  assert_int_equal(bring_scene_look(&wish, &path), EVEN_ERR_NOT_FOUND);
  even_os.statvfs = even_os_real.statvfs;
  assert_non_null(strstr(even_error_last()->what, "host host1 has step-3 in its memory alone"));
  assert_null(strstr(even_error_last()->fix, "rsync"));
}

/* Nor any that can be written to. */
static void to_the_disk_where_memory_does_not_take_it(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  open_memories(true);
  const char *memory = even_text_string(&at.params.memory->folder);
  assert_int_equal(rmdir(memory), 0);
  int fd = open(memory, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  assert_true(fd >= 0);
  (void)close(fd);
  bring_scene_assert_brings(&wish, scratch_path("leader/step-3"));
  assert_int_equal(unlink(memory), 0);
}

/* ---- whatever fails ---- */

/* Whether the fault was met: the last one that is not ends the test. `shares`: a file of it is here. */
static bool look_with_fault(fault_call call, long nth, bool shares) {
  even_bring_back_wish wish = bring_scene_wish();
  char here[256];
  (void)snprintf(here, sizeof here, "%s/step-1", at.folder);
  if (shares) {
    save_with_frozen(at.folder, 1, 1);
    wish.here = here;
  }
  char *path = NULL;
  bool memory = call == FAULT_CALL_COUNT;
  if (memory) {
    fault_allocation(nth);
  } else {
    fault_os(call, nth, ENOSPC);
  }
  even_status status = even_bring_back_newest(&at.job, &wish, &path);
  bool met = (memory ? fault_allocations() : fault_os_calls(call)) >= nth;
  fault_reset();
  assert_true((path != NULL) == (status == EVEN_OK)); /* nothing is begun anew */
  if (path != NULL) {
    assert_int_equal(even_checkpoint_verify(path, NULL), EVEN_OK);
  }
  if (!met && status != EVEN_OK) {
    print_error("nothing was made to fail: %s\n", even_error_last()->what);
  }
  assert_true(met || (path != NULL && strcmp(path, scratch_path("leader/step-3")) == 0));
  even_free(path);
  assert_true(!scratch_has("leader/step-3") || even_checkpoint_verify(scratch_path("leader/step-3"), NULL) == EVEN_OK);
  assert_false(scratch_has("leader/step-3" EVEN_CHECKPOINT_PARTIAL));
  (void)scratch_remove_tree(at.folder);
  bring_scene_begin_anew();
  return met;
}

static void whatever_fails_nothing_half_is_left_and_nothing_lost(void **state) {
  static const fault_call calls[] = {FAULT_open,   FAULT_write, FAULT_fsync,
                                     FAULT_rename, FAULT_mkdir, FAULT_CALL_COUNT /* allocations */};
  (void)state;
  save_with_frozen(at.sides[1].disk, 1, 2);
  save_with_frozen(at.sides[2].disk, 1, 3);
  for (size_t i = 0; i < 2 * (sizeof calls / sizeof calls[0]); i++) {
    long nth = 1;
    while (look_with_fault(calls[i / 2], nth, i % 2 == 1)) {
      nth++;
    }
    assert_true(nth > 1);
  }
}

/* ---- noise ---- */

static even_status say(int host, const char *text) {
  json_t *content = NULL;
  assert_int_equal(even_json_parse("a message", text, strlen(text), &content), EVEN_OK);
  even_status status = even_bring_give_hear(at.sides[host].give, content);
  json_decref(content);
  return status;
}

static void what_no_leader_asks_is_refused(void **state) {
  (void)state;
  assert_int_equal(say(1, "{}"), EVEN_ERR_INPUT);
  assert_int_equal(say(1, "{\"serial\":1,\"had\":[1,7,-1,\"x\"]}"), EVEN_OK); /* nothing is being sent */
  assert_int_equal(say(1, "{\"serial\":1,\"send\":\"step\",\"sum\":\"0000000000000000\"}"), EVEN_ERR_INPUT);
  assert_int_equal(say(1, "{\"serial\":1,\"send\":\"/step\",\"sum\":\"000000000000000\"}"), EVEN_ERR_INPUT);
  assert_int_equal(say(1, "{\"serial\":1,\"folders\":[\"here\"]}"), EVEN_ERR_INPUT);
  assert_int_equal(say(1, "{\"serial\":1,\"send\":\"/nowhere\",\"sum\":\"0000000000000000\"}"), EVEN_OK);
}

int main(void) {
#define BACK_TEST(name) cmocka_unit_test_setup_teardown(name, bring_scene_set_up, bring_scene_tear_down)
  const struct CMUnitTest tests[] = {
      BACK_TEST(the_newest_of_all_hosts_comes_back),
      BACK_TEST(what_has_not_changed_is_not_sent),
      BACK_TEST(what_is_shared_and_damaged_comes_as_the_rest),
      BACK_TEST(what_is_no_newer_stays_where_it_is),
      BACK_TEST(only_what_the_job_may_go_on_from_comes),
      BACK_TEST(a_damaged_copy_is_told_and_the_next_best_is_taken),
      BACK_TEST(what_hosts_see_in_common_is_looked_at_once),
      BACK_TEST(damage_on_the_way_is_found),
      BACK_TEST(a_host_that_is_lost_in_the_midst_leaves_the_next_best),
      BACK_TEST(the_only_copy_that_does_not_come_is_named),
      BACK_TEST(no_room_is_seen_before_anything_is_taken),
      BACK_TEST(a_host_that_does_not_answer_is_not_waited_for_without_end),
      BACK_TEST(what_hosts_cannot_give_another_place_may),
      BACK_TEST(a_leader_in_whose_place_another_one_leads_ends),
      BACK_TEST(whoever_ends_the_job_need_not_wait),
      BACK_TEST(names_that_are_taken_here),
      BACK_TEST(what_lies_in_memory_comes_to_memory),
      BACK_TEST(to_the_disk_where_there_is_no_memory_for_it),
      BACK_TEST(to_the_disk_where_memory_does_not_take_it),
      BACK_TEST(the_only_copy_in_a_memory_is_said_to_go_with_the_job),
      BACK_TEST(whatever_fails_nothing_half_is_left_and_nothing_lost),
      BACK_TEST(what_no_leader_asks_is_refused),
  };
  struct sigaction pipe_before; /* as agents have it */
  if (even_signals_pipe_ignore(&pipe_before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
