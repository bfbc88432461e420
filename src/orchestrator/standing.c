/* Which ranks were stopped and stand still, from agent to agent. */
#include "orchestrator/standing.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "fault/standing.h"
#include "orchestrator/follower.h"
#include "orchestrator/outlast.h"
#include "orchestrator/remote.h"
#include "os/clock.h"
#include "os/host.h"
#include "os/pipe.h"
#include "os/process_stat.h"

#include <string.h>

/* Between two looks at one that stands, and so by how much later than after their grace others hear of it; after
 * LATER_NS of standing, less often. */
enum { LOOK_MS = 20, PASS_MS = 5 };
#define LOOK_NS ((uint64_t)LOOK_MS * 1000000u)
#define LATER_NS ((uint64_t)1000 * 1000000u)
#define LATER_LOOK_NS (EVEN_STANDING_FRESH_NS / 3)
/* What hosts say within so long the leader passes on together. */
#define PASS_NS ((uint64_t)PASS_MS * 1000000u)

typedef struct word {
  uint32_t host; /* its mark */
  uint32_t process;
  uint32_t ms;      /* it has stood for so long; 0: it goes on */
  bool news;        /* to be said */
  bool told;        /* of a rank of this host: that it stands was said last */
  uint64_t told_ns; /* and when */
} word;

struct even_job_standing {
  int fd;
  even_standing *memory;
  uint32_t host;      /* this one's mark; 0: it is not known, and nothing is told of its ranks */
  uint64_t passed_ns; /* when the leader last passed anything on */
  word *words;        /* one a rank */
};

even_status even_job_standing_open(even_job *job) {
  char identity[256];
  if (job->most_groups < 2) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&job->standing));
  job->standing->fd = -1;
  even_host_identity(identity, sizeof identity);
  job->standing->host = identity[0] == '\0' ? 0 : even_host_mark(identity, sizeof identity);
  EVEN_TRY(EVEN_NEW_ARRAY(&job->standing->words, job->count));
  job->standing->fd = job->outlast != NULL && job->adopted ? even_outlast_standing(job) : -1;
  if (job->standing->fd < 0) {
    EVEN_TRY(even_standing_create((int)job->count, &job->standing->fd));
  }
  return even_standing_open(job->standing->fd, &job->standing->memory);
}

void even_job_standing_close(even_job *job) {
  if (job->standing != NULL) {
    even_standing_close(job->standing->memory);
    even_pipe_close(job->standing->fd);
    even_free(job->standing->words);
    even_free(job->standing);
  }
  job->standing = NULL;
}

void even_job_standing_begin(even_job *job) {
  if (job->standing != NULL) {
    even_standing_begin(job->standing->memory);
    memset(job->standing->words, 0, job->count * sizeof *job->standing->words);
  }
}

int even_job_standing_fd(const even_job *job) {
  return job->standing == NULL ? -1 : job->standing->fd;
}

/* ---- this host's ranks ---- */

/* For how long it has stood, as seen now; 0: it does not. One that the guardian holds is not stopped by anybody: its
 * time begins when it is let go, and still stands. */
static uint64_t stood_for(const even_job *job, even_job_rank *rank, bool held, uint64_t now_ns) {
  even_process_stat facts;
  if (!rank->alive || !rank->stands || job->stage != EVEN_JOB_RUNS) {
    return 0;
  }
  rank->stopped_ns = held ? now_ns : rank->stopped_ns;
  bool stands = !held && even_process_stat_read(rank->pid, &facts) == 0 && facts.state == 'T'; /* 't': a debugger's */
  return stands && now_ns > rank->stopped_ns ? now_ns - rank->stopped_ns : 0;
}

static bool is_due(const word *its, uint64_t stood_ns, uint64_t now_ns) {
  return now_ns - its->told_ns >= (stood_ns < LATER_NS ? LOOK_NS : LATER_LOOK_NS);
}

static void look(even_job *job, uint64_t now_ns) {
  even_job_standing *own = job->standing;
  bool held = even_job_guardian_holds(job);
  for (size_t i = 0; i < job->count; i++) {
    word *its = &own->words[i];
    even_job_rank *rank = &job->ranks[i];
    if (rank->elsewhere || (!rank->stands && !its->told)) {
      continue;
    }
    uint64_t stood_ns = stood_for(job, rank, held, now_ns);
    if (stood_ns == 0 ? its->told : is_due(its, stood_ns, now_ns)) {
      uint64_t ms = stood_ns / 1000000u;
      its->host = own->host;
      its->process = (uint32_t)rank->pid;
      its->ms = stood_ns == 0 ? 0 : ms == 0 ? 1 : ms < UINT32_MAX ? (uint32_t)ms : UINT32_MAX;
      its->told = stood_ns != 0;
      its->told_ns = now_ns;
      its->news = true;
    }
  }
}

static bool any_news(const even_job *job) {
  bool any = false;
  for (size_t i = 0; !any && i < job->count; i++) {
    any = job->standing->words[i].news;
  }
  return any;
}

bool even_job_standing_write(even_job *job, uint64_t now_ns, even_text *out) {
  if (job->standing->host != 0) {
    look(job, now_ns);
  }
  if (!any_news(job)) {
    return false;
  }
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_array(&json, "ranks");
  for (size_t i = 0; i < job->count; i++) {
    word *its = &job->standing->words[i];
    if (its->news) {
      even_json_object(&json, NULL);
      even_json_integer(&json, "rank", (int64_t)i);
      even_json_integer(&json, "host", its->host);
      even_json_integer(&json, "process", its->process);
      even_json_integer(&json, "ms", its->ms);
      even_json_object_end(&json);
      its->news = false;
    }
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  return true;
}

/* ---- other hosts' ---- */

static bool read_number(const json_t *content, const char *name, uint32_t *out) {
  const json_t *value = json_object_get(content, name);
  json_int_t number = json_integer_value(value);
  *out = (uint32_t)number;
  return json_is_integer(value) && number >= 0 && number <= UINT32_MAX;
}

static even_status take_one(even_job *job, const even_host_agent *agent, const json_t *one, uint64_t now_ns) {
  uint32_t rank = 0;
  word said = {.news = agent != NULL}; /* the leader passes it on */
  if (!read_number(one, "rank", &rank) || rank >= job->count || !read_number(one, "host", &said.host) ||
      !read_number(one, "process", &said.process) || !read_number(one, "ms", &said.ms) ||
      (agent != NULL && !even_host_agent_has(agent, rank))) {
    return even_fail(EVEN_ERR_INPUT, "who stands, of a rank that cannot be meant");
  }
  if (!even_job_is_here(job, rank)) { /* else it has come back from the leader */
    job->standing->words[rank] = said;
    even_standing_tell(job->standing->memory, (int)rank, said.host, said.process, (uint64_t)said.ms * 1000000u, now_ns);
  }
  return EVEN_OK;
}

even_status even_job_standing_take(even_job *job, const even_host_agent *agent, const json_t *content) {
  size_t at = 0;
  json_t *one = NULL;
  uint64_t now_ns = even_clock_ns();
  if (job->standing == NULL) {
    return even_fail(EVEN_ERR_INPUT, "who stands on other hosts, in a job of one");
  }
  json_array_foreach(json_object_get(content, "ranks"), at, one) {
    EVEN_TRY(take_one(job, agent, one, now_ns));
  }
  return EVEN_OK;
}

/* ---- both ---- */

static void tell_hosts(const even_job *job, const even_text *text) {
  for (size_t i = 1; job->hosts != NULL && i < job->hosts->count; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    if (agent->busy && agent->link != NULL &&
        even_link_send(agent->link, EVEN_MESSAGE_STANDING, text->data, NULL, 0) != EVEN_OK) {
      even_error_clear(); /* lack of memory: it is said again in a moment */
    }
  }
}

void even_job_standing_turn(even_job *job) {
  even_text text = EVEN_TEXT_EMPTY;
  uint64_t now_ns = even_clock_ns();
  bool leads = job->follower == NULL;
  if (job->standing == NULL || (leads && now_ns - job->standing->passed_ns < PASS_NS) ||
      (!leads && !even_job_follower_is_heard(job))) {
    return;
  }
  if (even_job_standing_write(job, now_ns, &text) && even_text_status(&text) == EVEN_OK) {
    job->standing->passed_ns = now_ns;
    if (leads) {
      tell_hosts(job, &text);
    } else {
      even_job_follower_send(job, EVEN_MESSAGE_STANDING, &text);
    }
  }
  even_text_free(&text);
}

int even_job_standing_look_ms(const even_job *job) {
  int ms = 0;
  for (size_t i = 0; job->standing != NULL && i < job->count; i++) {
    const word *its = &job->standing->words[i];
    if (its->news && (job->follower == NULL || even_job_follower_is_heard(job))) {
      return PASS_MS;
    }
    bool looks = !job->ranks[i].elsewhere && (job->ranks[i].stands || its->told);
    ms = looks ? LOOK_MS : ms;
  }
  return ms;
}
