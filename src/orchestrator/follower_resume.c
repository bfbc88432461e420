/* An agent that serves a leader is killed, and another one is started in its place (outlast.h): what the one leaves for
 * that, in words, and how the other begins. It holds the ranks that run as an agent does whose leader's was killed
 * (follower_wait.c), and comes to the leader, which takes it for the one before. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/outlast.h"
#include "os/path.h"
#include "os/socket.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static even_custody *custody_of(const even_follower *follower) {
  return follower->legacy == NULL ? NULL : follower->legacy->custody;
}

even_legacy *even_follower_kept_legacy(const even_follower *follower) {
  return custody_of(follower) == NULL ? NULL : follower->legacy;
}

even_legacy *even_follower_legacy(const even_follower *follower) {
  return follower->start.outlast_seconds > 0 ? even_follower_kept_legacy(follower) : NULL;
}

static bool keeps(const even_follower *follower) {
  return even_outlast_holds(&follower->job) && even_follower_legacy(follower) != NULL;
}

/* Places for an attempt that is planned would be known to this one alone. */
bool even_job_follower_is_calm(const even_job *job) {
  const even_follower *follower = job->follower;
  return follower->running && keeps(follower) && !follower->asked && !follower->ended && !follower->refused &&
         !follower->waited && follower->checks == NULL && follower->next.own.count == 0 &&
         follower->next.warm == NULL && job->own_notice.signal == 0;
}

/* ---- what is left ---- */

static void write_words(const even_follower *follower, even_text *out) {
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_raw(&json, "start", even_text_string(&follower->started));
  even_json_raw(&json, "facts", follower->facts.length == 0 ? "{}" : even_text_string(&follower->facts));
  even_json_string(&json, "invitation", follower->invitation);
  even_json_string(&json, "folder", even_text_string(&follower->folder));
  even_json_string(&json, "leader", follower->link.peer);
  even_json_integer(&json, "host", follower->host);
  even_json_integer(&json, "place", follower->place);
  even_json_integer(&json, "wish", follower->wish);
  even_json_integer(&json, "silence_ms", even_socket_silence());
  even_json_object(&json, "kept");
  even_bring_kept_write(&follower->kept, &json);
  even_json_object_end(&json);
  even_json_object_end(&json);
}

static even_status leave_words(even_follower *follower) {
  even_text words = EVEN_TEXT_EMPTY;
  write_words(follower, &words);
  even_status status = even_outlast_part_leave(&follower->part, custody_of(follower), &words, follower->job.count);
  if (words.data != NULL) {
    explicit_bzero(words.data, words.length); /* the key */
  }
  even_text_free(&words);
  return status;
}

static even_status leave_part(even_follower *follower) {
  EVEN_TRY(leave_words(follower));
  even_outlast_part_note(&follower->part, follower->reader); /* what was passed on of the attempts before */
  EVEN_TRY(even_outlast_part_link(&follower->part, custody_of(follower), follower->link.fd));
  return even_outlast_part_known(&follower->part, custody_of(follower));
}

even_status even_follower_leave(even_follower *follower) {
  if (!keeps(follower)) {
    return EVEN_OK;
  }
  even_outlast_keep_memory(&follower->job);
  EVEN_TRY(even_legacy_leave_part(follower->legacy, &follower->job));
  if (leave_part(follower) != EVEN_OK) {
    even_outlast_forgo(&follower->job);
  }
  return EVEN_OK;
}

void even_follower_kept_changed(void *context) {
  even_follower *follower = context;
  if (follower->running && keeps(follower) && leave_words(follower) != EVEN_OK) {
    even_outlast_forgo(&follower->job);
  }
}

void even_follower_keep_link(even_follower *follower) {
  if (keeps(follower) && even_outlast_part_link(&follower->part, custody_of(follower), follower->link.fd) != EVEN_OK) {
    even_outlast_forgo(&follower->job);
  }
}

void even_follower_known(even_follower *follower) {
  if (keeps(follower) && even_outlast_part_known(&follower->part, custody_of(follower)) != EVEN_OK) {
    even_outlast_forgo(&follower->job);
  }
}

/* That of an agent before lives until the leader knows this one. */
void even_follower_unlink(even_follower *follower) {
  if (!follower->held && keeps(follower) &&
      even_outlast_part_unlink(&follower->part, custody_of(follower)) != EVEN_OK) {
    even_outlast_forgo(&follower->job);
  }
}

/* ---- what was left ---- */

static even_status read_start(even_follower *follower) {
  const json_t *start = json_object_get(follower->left, "start");
  char *text = json_dumps(start, JSON_COMPACT);
  if (text == NULL) {
    return even_fail(EVEN_ERR_MEMORY, "what the leader has said of the attempt cannot be kept");
  }
  even_text_add(&follower->started, text);
  free(text);
  EVEN_TRY(even_text_status(&follower->started));
  return even_remote_start_of(start, &follower->start);
}

static even_status read_facts(even_follower *follower) {
  char *text = json_dumps(json_object_get(follower->left, "facts"), JSON_COMPACT);
  even_text_add(&follower->facts, text == NULL ? "{}" : text);
  free(text);
  return even_text_status(&follower->facts);
}

static int number_of(const even_follower *follower, const char *name) {
  return (int)json_integer_value(json_object_get(follower->left, name));
}

/* As the leader's CHECK and START were taken by the one before. */
static even_status read_words(even_follower *follower) {
  EVEN_TRY(read_start(follower));
  EVEN_TRY(read_facts(follower));
  EVEN_TRY(even_bring_kept_read(&follower->kept, json_object_get(follower->left, "kept")));
  const char *folder = even_json_text(follower->left, "folder");
  follower->invitation = even_json_text(follower->left, "invitation");
  follower->host = number_of(follower, "host");
  follower->place = number_of(follower, "place");
  follower->wish = number_of(follower, "wish");
  even_text_add(&follower->folder, folder);
  EVEN_TRY(even_text_status(&follower->folder));
  even_socket_silence_set(number_of(follower, "silence_ms"));
  (void)snprintf(follower->link.peer, sizeof follower->link.peer, "%s", even_json_text(follower->left, "leader"));
  EVEN_TRY(even_path_enter(folder));
  EVEN_TRY(even_device_select(NULL, follower->wish, &follower->own));
  EVEN_TRY(even_follower_use_devices(follower));
  if (follower->own.count != (size_t)follower->start.count) {
    return even_fail(EVEN_ERR_MISMATCH, "the agent before has left %d ranks, and %zu devices are here",
                     follower->start.count, follower->own.count);
  }
  return EVEN_OK;
}

even_status even_follower_resume(even_follower *follower) {
  const char *words = NULL;
  EVEN_TRY(even_outlast_part_take(&follower->part, custody_of(follower), &words));
  EVEN_TRY(even_json_parse("what the agent before has left", words, strlen(words), &follower->left));
  EVEN_TRY(read_words(follower));
  EVEN_TRY(even_follower_open_left(follower));
  even_outlast_part_go_on(&follower->part, follower->reader);
  (void)even_fail(EVEN_ERR_PEER_LOST, "the agent before was killed here, and the leader is not found any more");
  follower->why = *even_error_last();
  even_error_clear();
  follower->gone = follower->held = follower->asked = true;
  return EVEN_OK;
}

void even_follower_forget_left(even_follower *follower) {
  if (follower->left != NULL) {
    const char *invitation = even_json_text(follower->left, "invitation");
    explicit_bzero((char *)(uintptr_t)invitation, strlen(invitation)); /* the key */
  }
  json_decref(follower->left);
  follower->left = NULL;
  even_text_free(&follower->started);
  even_text_free(&follower->untold);
  even_text_free(&follower->folder);
  even_outlast_part_close(&follower->part);
}
