/* One checkpoint of another host comes to its leader. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/bring.h"
#include "orchestrator/bring_back_parts.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/succession.h"
#include "os/path.h"

even_status even_bring_back_own_folder(const even_job *job, even_text *out) {
  even_text_clear(out);
  if (job->params->checkpoint_folder != NULL) {
    return even_path_absolute(job->params->checkpoint_folder, out);
  }
  even_text_format(out, "%s/received", even_text_string(&job->run_folder));
  return even_text_status(out);
}

void even_bring_back_fail(even_bring_back *back) {
  back->failed = true;
  back->why = *even_error_last();
  even_error_clear();
}

void even_bring_back_fail_as_said(even_bring_back *back, const json_t *content) {
  json_int_t status = json_integer_value(json_object_get(content, "status"));
  (void)even_fail(status > EVEN_OK && status <= EVEN_ERR_INTERRUPTED ? (even_status)status : EVEN_ERR_SYSTEM, "%.560s",
                  even_json_text(content, "what"));
  (void)even_error_fix("%s", even_json_text(content, "fix"));
  even_bring_back_fail(back);
}

/* The host hears it in these words. */
static void say_had(even_bring_back *back, even_text *text) {
  const even_host_agent *agent = &back->job->hosts->agents[back->from];
  if (even_bring_back_reaches(agent) && even_link_send_text(agent->link, EVEN_MESSAGE_SEEK, text, NULL, 0) != EVEN_OK) {
    even_bring_back_fail(back);
  }
}

/* What the taking of it says, in the words in which a host says it to its leader. */
static void told(void *context, even_text *text) {
  even_bring_back *back = context;
  json_t *content = NULL;
  even_status status = even_text_status(text);
  if (status == EVEN_OK) {
    status = even_json_parse("what came back", text->data, text->length, &content);
  }
  if (status != EVEN_OK) {
    even_bring_back_fail(back);
  } else if (json_object_get(content, "status") != NULL) {
    even_bring_back_fail_as_said(back, content);
  } else if (json_is_array(json_object_get(content, "had"))) {
    say_had(back, text);
  } else if (json_is_true(json_object_get(content, "holds"))) {
    even_text_clear(&back->place);
    even_text_add(&back->place, even_json_text(content, "folder"));
    back->whole = even_text_status(&back->place) == EVEN_OK;
    if (!back->whole) {
      even_bring_back_fail(back);
    }
  }
  json_decref(content);
  even_text_free(text);
}

/* A damaged one of the same name gives way to it where it was the same; another one keeps its name. */
static even_status choose_places(const even_bring_back *back, const even_bring_found *one, even_text *folder,
                                 even_text *other) {
  uint64_t sum = 0;
  char digits[EVEN_BRING_SUM_DIGITS + 1];
  EVEN_TRY(even_bring_back_own_folder(back->job, folder));
  even_text_format(folder, "/%s", even_path_name(one->folder));
  EVEN_TRY(even_text_status(folder));
  bool same = even_bring_sum_of(folder->data, &sum) && sum == one->sum;
  even_bring_sum_write(one->sum, digits);
  even_text_add(other, folder->data);
  if (!same) {
    even_text_format(other, "-%.8s", digits);
  }
  return even_text_status(other);
}

static even_status say_send(even_bring_back *back, const even_bring_found *one) {
  even_host_agent *agent = &back->job->hosts->agents[one->host];
  char digits[EVEN_BRING_SUM_DIGITS + 1];
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_bring_sum_write(one->sum, digits);
  even_json_object(&json, NULL);
  even_json_unsigned(&json, "serial", back->serial);
  even_json_string(&json, "send", one->folder);
  even_json_string(&json, "sum", digits);
  even_json_object_end(&json);
  return even_link_send_text(agent->link, EVEN_MESSAGE_SEEK, &text, NULL, 0);
}

/* Until it is here, or not: EVEN_OK, and `whole` or `failed`. */
static even_status await_files(even_bring_back *back, const even_bring_found *one, even_bring_take *take) {
  const even_host_agent *agent = &back->job->hosts->agents[one->host];
  while (!back->whole && !back->failed) {
    EVEN_TRY(even_bring_back_turn(back));
    even_bring_take_tick(take);
    if (!back->whole && !back->failed && !even_bring_back_reaches(agent)) {
      (void)even_fail(EVEN_ERR_PEER_LOST, "host %s is lost: %s", agent->name, agent->lost_words);
      even_bring_back_fail(back);
    } else if (!back->whole && !back->failed && even_bring_take_is_idle(take, EVEN_BRING_PATIENCE_NS)) {
      (void)even_fail(EVEN_ERR_TIMEOUT, "nothing came for %g s", (double)EVEN_BRING_PATIENCE_NS * 1e-9);
      even_bring_back_fail(back);
    }
  }
  return EVEN_OK;
}

static even_status take_files(even_bring_back *back, const even_bring_found *one, bool memory, const char *shared,
                              even_bring_take *take) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_text other = EVEN_TEXT_EMPTY;
  even_status status = choose_places(back, one, &folder, &other);
  if (status == EVEN_OK) {
    const even_bring_wish wish = {.serial = back->serial,
                                  .folder = folder.data,
                                  .other = other.data,
                                  .sum = one->sum,
                                  .memory = memory,
                                  .shared = shared};
    status = even_bring_take_begin(take, &wish);
  }
  if (status == EVEN_OK) {
    status = say_send(back, one);
  }
  even_text_free(&folder);
  even_text_free(&other);
  return status == EVEN_OK ? await_files(back, one, take) : status;
}

/* What is no error of this host's as such is `failed`. */
static even_status bring(even_bring_back *back, const even_bring_found *one, bool memory, const char *shared) {
  even_parcels *parcels = back->job->hosts->parcels;
  even_bring_kept kept = {.host = memory ? back->job->params->memory : NULL};
  even_bring_take *take = NULL;
  back->from = one->host;
  back->serial = ++back->job->hosts->brought;
  back->whole = back->failed = false;
  back->spared_bytes = 0;
  even_status status = even_bring_take_open(parcels, (int)one->host, &kept, told, back, &take);
  if (status == EVEN_OK) {
    status = take_files(back, one, memory, shared, take);
    back->spared_bytes = even_bring_take_spared(take);
  }
  if (status != EVEN_OK && status != EVEN_ERR_INTERRUPTED) {
    even_bring_back_fail(back);
    status = even_succession_refuse_superseded(back->job->hosts);
  }
  const even_error kept_error = *even_error_last();
  even_parcels_withdraw(parcels, EVEN_BRING_BACK_PARCEL);
  even_bring_take_close(take);
  kept.host = NULL; /* the job's */
  even_bring_kept_free(&kept);
  back->from = 0;
  (void)even_error_restore(&kept_error);
  return status;
}

/* What it shares may be what is damaged: then all of it comes. */
static even_status bring_sharing(even_bring_back *back, const even_bring_found *one, bool memory) {
  EVEN_TRY(bring(back, one, memory, back->wish->here));
  bool again = back->failed && back->why.status == EVEN_ERR_CORRUPT && back->spared_bytes > 0;
  return again ? bring(back, one, memory, NULL) : EVEN_OK;
}

/* What memory does not hold the disk may. */
even_status even_bring_back_one(even_bring_back *back, const even_bring_found *one) {
  bool memory = one->memory && back->job->params->memory != NULL;
  EVEN_TRY(bring_sharing(back, one, memory));
  bool again = memory && back->failed && back->why.status != EVEN_ERR_CORRUPT &&
               even_bring_back_reaches(&back->job->hosts->agents[one->host]);
  return again ? bring_sharing(back, one, false) : EVEN_OK;
}
