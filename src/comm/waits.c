/* What this process's threads wait in, and telling it on the pads of all of its groups. */
#include "comm/waits.h"

#include "comm/group.h"
#include "comm/messages.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/process_stat.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

#define RELAXED memory_order_relaxed
#define WORDS (sizeof(even_process_words) / sizeof(uint64_t))
#define FRESH_NS (2 * EVEN_WAITS_SETTLED_NS)

_Static_assert(sizeof(even_process_words) % sizeof(uint64_t) == 0, "copied by words");

typedef enum thread_state { THREAD_GOES_ON, THREAD_RESTS, THREAD_WAITS } thread_state;

/* A thread that calls, or has called. */
typedef struct calling_thread {
  struct calling_thread *next;
  bool known;
  bool first; /* of the process */
  thread_state state;
  const _Atomic uint32_t *word; /* of one that rests */
  uint32_t seen;
  even_wait_words words; /* of one that waits, */
  const void *message;   /* and for which. Of one that rests behind another, `words.site` is where */
  const even_comm *comm; /* in which it waits, or rests behind who does; NULL: none. Not looked into */
} calling_thread;

static _Thread_local calling_thread own;

static struct {
  pthread_mutex_t lock; /* over all of this; taken before no other */
  calling_thread *threads;
  even_comm *groups;
  uint64_t process;
  uint64_t change;
  uint64_t whole_change;  /* at which all were seen to wait, */
  uint64_t whole_ns;      /* since then, */
  uint64_t whole_seen_ns; /* and last then */
} here = {.lock = PTHREAD_MUTEX_INITIALIZER};

static even_process_words told; /* what is there to be told, under the lock */

static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static pthread_key_t thread_ends;
static _Atomic bool unprepared; /* threads that end are not noticed: nothing is ever known of all of them */

static _Atomic(even_waits_others_call *) others_call;
static _Atomic(void *) others_context;

/* ---- the threads ---- */

static void forget_thread(void *thread) {
  (void)pthread_mutex_lock(&here.lock);
  calling_thread **at = &here.threads;
  while (*at != NULL && *at != thread) {
    at = &(*at)->next;
  }
  if (*at != NULL) {
    *at = (*at)->next;
    here.change++;
  }
  ((calling_thread *)thread)->known = false;
  (void)pthread_mutex_unlock(&here.lock);
}

/* A child has one thread, none of its parent's groups, and perhaps a lock that nobody there will give back. */
static void begin_again(void) {
  (void)pthread_mutex_init(&here.lock, NULL);
  here.threads = NULL;
  here.groups = NULL;
  here.process = 0;
  own.known = false;
}

static void prepare(void) {
  if (pthread_key_create(&thread_ends, forget_thread) != 0 || !even_process_fork_calls(begin_again)) {
    atomic_store(&unprepared, true);
  }
}

static void meet_thread(void) {
  (void)pthread_once(&prepared, prepare);
  if (atomic_load(&unprepared) || pthread_setspecific(thread_ends, &own) != 0) {
    atomic_store(&unprepared, true);
    return;
  }
  (void)pthread_mutex_lock(&here.lock);
  own = (calling_thread){.next = here.threads, .known = true, .first = even_os.gettid() == even_own_process()};
  here.threads = &own;
  here.change++;
  (void)pthread_mutex_unlock(&here.lock);
}

void even_waits_call(void) {
  if (!own.known) {
    meet_thread();
  }
}

static void go_on(void) {
  (void)pthread_mutex_lock(&here.lock);
  own.state = THREAD_GOES_ON;
  here.change++;
  (void)pthread_mutex_unlock(&here.lock);
}

void even_waits_rest(const _Atomic uint32_t *word, uint32_t seen) {
  even_waits_call();
  bool already = own.state == THREAD_RESTS && own.word == word && own.seen == seen;
  if (own.known && !already) {
    (void)pthread_mutex_lock(&here.lock);
    own.word = word;
    own.seen = seen;
    own.comm = NULL;
    own.state = THREAD_RESTS;
    here.change++;
    (void)pthread_mutex_unlock(&here.lock);
  }
}

void even_waits_go_on(void) {
  if (own.known && own.state != THREAD_GOES_ON) {
    go_on();
  }
}

bool even_waits_rested_on(const _Atomic uint32_t *word) {
  bool found = false;
  (void)pthread_mutex_lock(&here.lock);
  for (const calling_thread *thread = here.threads; thread != NULL && !found; thread = thread->next) {
    found = thread->state == THREAD_RESTS && thread->word == word && atomic_load(word) == thread->seen;
  }
  (void)pthread_mutex_unlock(&here.lock);
  return found;
}

void even_waits_ask_others(even_waits_others_call *call, void *context) {
  atomic_store(&others_context, context);
  atomic_store(&others_call, call);
}

/* ---- the groups ---- */

static uint64_t new_process(void) {
  uint64_t mark = even_clock_ns() ^ (uint64_t)even_own_process() << 40;
  mark = (mark ^ (mark >> 30)) * 0xbf58476d1ce4e5b9u; /* splitmix64, as in call.c */
  mark = (mark ^ (mark >> 27)) * 0x94d049bb133111ebu;
  return (mark ^ (mark >> 31)) | 1u;
}

void even_waits_open(even_comm *comm) {
  if (comm->pads == NULL) {
    return;
  }
  even_waits_call();
  (void)pthread_mutex_lock(&here.lock);
  here.process = here.process == 0 ? new_process() : here.process;
  atomic_store(&even_comm_pad_of(comm, comm->rank)->process, here.process);
  comm->next_group = here.groups;
  here.groups = comm;
  here.change++;
  (void)pthread_mutex_unlock(&here.lock);
}

void even_waits_close(even_comm *comm) {
  (void)pthread_mutex_lock(&here.lock);
  even_comm **at = &here.groups;
  while (*at != NULL && *at != comm) {
    at = &(*at)->next_group;
  }
  if (*at != NULL) { /* not in a child of a fork, whose parent goes on with it */
    *at = comm->next_group;
    here.change++;
    atomic_store(&even_comm_pad_of(comm, comm->rank)->version, 0);
  }
  (void)pthread_mutex_unlock(&here.lock);
}

static int rank_of_process(void) {
  const even_comm *largest = here.groups;
  for (const even_comm *group = here.groups; group != NULL; group = group->next_group) {
    largest = group->ranks >= largest->ranks ? group : largest; /* of several the oldest */
  }
  return largest == NULL ? -1 : even_comm_number(largest, largest->rank);
}

/* ---- the pads ---- */

static void write_pad(even_wait_pad *pad, const uint64_t *words) {
  uint64_t version = atomic_load_explicit(&pad->version, RELAXED) | 1u;
  atomic_store_explicit(&pad->version, version, RELAXED);
  atomic_thread_fence(memory_order_release);
  for (size_t i = 0; i < WORDS; i++) {
    atomic_store_explicit(&pad->words[i], words[i], RELAXED);
  }
  atomic_store_explicit(&pad->version, version + 1, memory_order_release);
}

bool even_waits_read(even_wait_pad *pad, even_process_words *out) {
  uint64_t words[WORDS];
  uint64_t version = atomic_load_explicit(&pad->version, memory_order_acquire);
  if (version == 0 || (version & 1u) != 0) {
    return false;
  }
  for (size_t i = 0; i < WORDS; i++) {
    words[i] = atomic_load_explicit(&pad->words[i], RELAXED);
  }
  atomic_thread_fence(memory_order_acquire);
  if (atomic_load_explicit(&pad->version, RELAXED) != version) {
    return false;
  }
  memcpy(out, words, sizeof *out);
  out->waits = out->waits < EVEN_WAITS ? out->waits : EVEN_WAITS; /* whatever the memory holds */
  for (uint32_t i = 0; i < out->waits; i++) {
    even_wait_words *wait = &out->wait[i];
    wait->whoms = wait->whoms < EVEN_WAITS_WHOM ? wait->whoms : EVEN_WAITS_WHOM;
    wait->doing[sizeof wait->doing - 1] = wait->group[sizeof wait->group - 1] = wait->site[sizeof wait->site - 1] = 0;
  }
  return true;
}

/* ---- telling ---- */

/* Whether a thread before this one in the list waits for the same message. */
static bool is_counted(const calling_thread *thread) {
  for (const calling_thread *before = here.threads; before != thread; before = before->next) {
    if (before->state == THREAD_WAITS && before->words.message != 0 && before->message == thread->message) {
      return true;
    }
  }
  return false;
}

/* Whether each thread that has called waits, or rests until one of them has it go on, and nothing else of theirs is
 * under way that could let them. Of a message that only has begun, others could. */
static bool all_wait(int *threads) {
  size_t waits = 0;
  size_t messages = 0;
  size_t open = 0;
  bool first = false;
  *threads = 0;
  for (const calling_thread *thread = here.threads; thread != NULL; thread = thread->next) {
    ++*threads;
    if (thread->state == THREAD_GOES_ON ||
        (thread->state == THREAD_RESTS && thread->word != NULL && atomic_load(thread->word) != thread->seen)) {
      return false;
    }
    first = first || thread->first;
    if (thread->state == THREAD_WAITS) {
      waits++;
      messages += thread->words.message != 0 && !is_counted(thread);
    }
  }
  for (const even_comm *group = here.groups; group != NULL; group = group->next_group) {
    open += atomic_load(&group->messages->open);
  }
  return first && waits > 0 && waits <= EVEN_WAITS && open == messages && !atomic_load(&unprepared);
}

/* Whether one may call that has not called yet; `threads` have. */
static even_waits_others ask_others(int threads) {
  even_process_stat facts;
  even_waits_others_call *call = atomic_load(&others_call);
  if (call != NULL) {
    return call(atomic_load(&others_context));
  }
  bool all = even_process_stat_read(0, &facts) == 0 && facts.threads == threads;
  return all ? EVEN_WAITS_OTHERS_NONE : EVEN_WAITS_OTHERS_MAY;
}

/* Whether all wait that can call. What was known before stays known to a thread that cannot ask: who could says so
 * again for as long as it is so. */
static void look_at_all(void) {
  int threads = 0;
  uint64_t looked_ns = even_clock_ns();
  (void)pthread_mutex_lock(&here.lock);
  uint64_t change = here.change;
  bool whole = all_wait(&threads);
  (void)pthread_mutex_unlock(&here.lock);
  even_waits_others others = whole ? ask_others(threads) : EVEN_WAITS_OTHERS_MAY;
  (void)pthread_mutex_lock(&here.lock);
  bool known = here.whole_change == change && here.whole_ns != 0;
  if (here.change != change || others == EVEN_WAITS_OTHERS_MAY || (others == EVEN_WAITS_OTHERS_UNKNOWN && !known)) {
    here.whole_change = 0;
    here.whole_ns = 0;
  } else if (others == EVEN_WAITS_OTHERS_NONE) {
    here.whole_change = change;
    here.whole_ns = known ? here.whole_ns : even_clock_ns();
    here.whole_seen_ns = looked_ns;
  }
  (void)pthread_mutex_unlock(&here.lock);
}

/* Where a thread rests behind the one that waits: that one has a line of the program. */
static const char *site_behind(const calling_thread *waits) {
  for (const calling_thread *thread = here.threads; thread != NULL; thread = thread->next) {
    if (thread->state == THREAD_RESTS && thread->comm != NULL && thread->comm == waits->comm &&
        thread->words.site[0] != '\0') {
      return thread->words.site;
    }
  }
  return waits->words.site;
}

static void tell_all(void) {
  even_process_words *words = &told;
  *words = (even_process_words){.process = here.process,
                                .change = here.change,
                                .whole_ns = here.whole_ns,
                                .whole_seen_ns = here.whole_seen_ns,
                                .rank = rank_of_process()};
  for (int firsts = 1; firsts >= 0; firsts--) {
    for (const calling_thread *thread = here.threads; thread != NULL; thread = thread->next) {
      if (thread->state == THREAD_WAITS && thread->words.main == (uint32_t)firsts && words->waits < EVEN_WAITS) {
        even_wait_words *wait = &words->wait[words->waits++];
        *wait = thread->words;
        (void)snprintf(wait->site, sizeof wait->site, "%s", site_behind(thread));
      }
    }
  }
  uint64_t copy[WORDS];
  memcpy(copy, words, sizeof copy);
  for (even_comm *group = here.groups; group != NULL; group = group->next_group) {
    write_pad(even_comm_pad_of(group, group->rank), copy);
  }
}

static void tell(const even_comm *comm, even_waiting *waiting, const even_wait_words *words, const void *message) {
  (void)pthread_mutex_lock(&here.lock);
  if (!waiting->told) {
    own.state = THREAD_WAITS;
    own.words.number = ++here.change;
    waiting->told = true;
  }
  uint64_t number = own.words.number;
  own.words = *words;
  own.words.number = number;
  own.message = message;
  own.comm = comm;
  (void)pthread_mutex_unlock(&here.lock);
  look_at_all();
  (void)pthread_mutex_lock(&here.lock);
  tell_all();
  if (here.whole_ns != 0) {
    even_waits_look_for_circle(here.groups, &told, even_clock_ns());
  }
  (void)pthread_mutex_unlock(&here.lock);
}

void even_waits_end(even_waiting *waiting) {
  if (waiting->told) {
    waiting->told = false;
    (void)pthread_mutex_lock(&here.lock);
    own.state = THREAD_GOES_ON;
    here.change++;
    here.whole_change = 0;
    here.whole_ns = 0;
    tell_all();
    (void)pthread_mutex_unlock(&here.lock);
  }
}

/* Whether the wait of that number was found to be a part of a circle, as is said on a pad of any of the groups. */
static bool was_found(uint64_t number, even_error *why) {
  bool found = false;
  (void)pthread_mutex_lock(&here.lock);
  for (even_comm *group = here.groups; group != NULL && !found; group = group->next_group) {
    even_wait_pad *pad = even_comm_pad_of(group, group->rank);
    if (atomic_load(&pad->found_change) < number || atomic_exchange(&pad->held, 1u) != 0) {
      continue;
    }
    found = pad->found_process == here.process && atomic_load(&pad->found_change) >= number;
    if (found) {
      even_comm_end_words_read(&pad->found, why);
    }
    atomic_store(&pad->held, 0);
  }
  (void)pthread_mutex_unlock(&here.lock);
  return found;
}

/* Of a collective, as it is in the flight record. */
static bool read_site(const even_comm *comm, even_waiting *waiting) {
  const even_flight_writer *flight = &comm->flight;
  even_flight_site_of(flight, comm->rank, flight->number, waiting->site, sizeof waiting->site);
  if (waiting->site[0] != '\0') {
    memmove(waiting->site, waiting->site + strlen(" at "), strlen(waiting->site + strlen(" at ")) + 1);
  }
  return waiting->site[0] != '\0';
}

static void ask_site(even_comm *comm, even_waiting *waiting, bool collective) {
  const even_flight_writer *flight = &comm->flight;
  waiting->asked = true;
  if (collective) { /* it is in the flight record, too, from now on */
    even_flight_say(&comm->flight);
    if (read_site(comm, waiting)) {
      return;
    }
  }
  if (flight->ask == NULL || !flight->ask(flight->context, waiting->site, sizeof waiting->site)) {
    waiting->site[0] = '\0';
  }
}

static void name_group(const even_comm *comm, char *text, size_t bytes) {
  if (comm->name[0] != '\0') {
    (void)snprintf(text, bytes, "group %.*s", (int)bytes - 7, comm->name);
  } else {
    (void)snprintf(text, bytes, "a group of %d ranks", comm->ranks);
  }
}

static bool is_told(const even_comm *comm, const even_waiting *waiting, uint64_t since_ns, uint64_t now_ns) {
  return comm->pads != NULL && own.known && (waiting->told || now_ns - since_ns >= EVEN_WAITS_TOLD_NS);
}

/* Whether all threads have been seen to wait, and none has gone on since: who is asked then keeps none waiting. */
static bool was_whole(void) {
  (void)pthread_mutex_lock(&here.lock);
  bool whole = here.whole_ns != 0 && here.whole_change == here.change;
  (void)pthread_mutex_unlock(&here.lock);
  return whole;
}

/* `late`: a rank that this one waits for; -1: none in particular. `message`: of which; NULL: in a collective. */
static bool look(even_comm *comm, even_waiting *waiting, even_wait_words *words, int late, const void *message) {
  even_error why;
  uint64_t now_ns = words->seen_ns;
  uint64_t waited_ns = now_ns - words->since_ns;
  if (!waiting->told || now_ns - waiting->told_ns >= EVEN_WAITS_TOLD_NS) {
    waiting->told_ns = now_ns;
    if (!waiting->asked && waited_ns >= EVEN_WAITS_ASKED_NS && was_whole()) {
      ask_site(comm, waiting, message == NULL);
    } else if (!waiting->asked && message == NULL) {
      (void)read_site(comm, waiting); /* what the caller has said itself */
    }
    memcpy(words->site, waiting->site, sizeof words->site);
    words->main = own.first ? 1 : 0;
    name_group(comm, words->group, sizeof words->group);
    tell(comm, waiting, words, message);
  }
  if (!was_found(own.words.number, &why)) {
    return false;
  }
  why.rank = late < 0 ? -1 : even_comm_number(comm, late);
  even_group_end_told(comm, &why);
  return !even_group_whole(comm); /* whole: another died that was about to say why */
}

void even_waits_rest_behind(even_comm *comm, even_waiting *waiting, const _Atomic uint32_t *word, uint32_t seen,
                            uint64_t since_ns) {
  uint64_t now_ns = even_clock_ns();
  even_waits_rest(word, seen);
  if (!own.known || now_ns - since_ns < EVEN_WAITS_TOLD_NS || now_ns - waiting->told_ns < EVEN_WAITS_TOLD_NS) {
    return;
  }
  waiting->told_ns = now_ns;
  if (!waiting->asked && now_ns - since_ns >= EVEN_WAITS_ASKED_NS && was_whole()) {
    ask_site(comm, waiting, false);
    (void)pthread_mutex_lock(&here.lock);
    memcpy(own.words.site, waiting->site, sizeof own.words.site);
    own.comm = comm;
    (void)pthread_mutex_unlock(&here.lock);
  }
  look_at_all();
}

static void wait_for(const even_comm *comm, even_wait_words *words, int rank) {
  if (words->whoms < EVEN_WAITS_WHOM) {
    words->whom[words->whoms++] = atomic_load(&even_comm_pad_of(comm, rank)->process);
  } else if (words->any != 0) {
    words->whom[0] = 0; /* not all of them are told */
  }
}

bool even_waits_in_collective(even_comm *comm, even_waiting *waiting, uint64_t now_ns) {
  even_wait_words words = {.since_ns = comm->waits_since, .seen_ns = now_ns};
  int late = -1;
  if (!is_told(comm, waiting, comm->waits_since, now_ns)) {
    return false;
  }
  if (comm->chain.under_way) {
    late = even_chain_missing(comm);
    if (late == comm->ranks) {
      return false;
    }
    wait_for(comm, &words, late);
  }
  for (int rank = 0; rank < comm->ranks && !comm->chain.under_way; rank++) {
    if (!even_stage_has_come(comm, rank)) {
      late = late < 0 ? rank : late;
      wait_for(comm, &words, rank);
    }
  }
  even_call_describe(&comm->call, words.doing, sizeof words.doing);
  return look(comm, waiting, &words, late, NULL);
}

bool even_waits_for_message(even_comm *comm, even_waiting *waiting, const void *message, const char *doing, int peer,
                            uint64_t since_ns, uint64_t now_ns) {
  even_wait_words words = {
      .since_ns = since_ns, .seen_ns = now_ns, .message = 1, .any = peer == EVEN_COMM_ANY_RANK ? 1 : 0};
  if (!is_told(comm, waiting, since_ns, now_ns)) {
    return false;
  }
  for (int rank = 0; rank < comm->ranks; rank++) {
    if (rank == peer || (words.any != 0 && rank != comm->rank && atomic_load(&comm->controls[rank].left) == 0)) {
      wait_for(comm, &words, rank);
    }
  }
  (void)snprintf(words.doing, sizeof words.doing, "%s", doing);
  return look(comm, waiting, &words, words.any != 0 ? -1 : peer, message);
}

/* ---- reading ---- */

void even_waits_describe_wait(const even_wait_words *wait, int rank, size_t site_bytes, uint64_t now_ns, char *text,
                              size_t bytes) {
  size_t length = strlen(wait->site);
  size_t cut = length > site_bytes ? length - site_bytes : 0; /* the end of a path says more than its beginning */
  double seconds = now_ns > wait->since_ns ? (double)(now_ns - wait->since_ns) * 1e-9 : 0;
  (void)snprintf(text, bytes, "rank %d is in %s of %s%s%s%s for %.1f s", rank, wait->doing, wait->group,
                 length > 0 ? " at " : "", cut > 0 ? "…" : "", wait->site + cut, seconds);
}

void even_waits_describe(const even_comm *comm, int rank, char *text, size_t bytes) {
  even_process_words words;
  uint64_t now = even_clock_ns();
  text[0] = '\0';
  if (comm->pads == NULL || rank == comm->rank || !even_waits_read(even_comm_pad_of(comm, rank), &words) ||
      words.waits == 0 || words.process == atomic_load(&even_comm_pad_of(comm, comm->rank)->process)) {
    return;
  }
  if (words.wait[0].seen_ns + FRESH_NS > now) {
    (void)snprintf(text, bytes, "; ");
    even_waits_describe_wait(&words.wait[0], even_comm_number(comm, rank), sizeof words.wait[0].site, now, text + 2,
                             bytes - 2);
  }
}
