/* Words for a rank's end, and the choice of the one that began it. */
#include "fault/cause.h"

#include "base/fail.h"
#include "fault/traceback.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { EXCERPT_LINES = 16, EXCERPT_BYTES = 4000 };

static void add_memory(even_text *out, uint64_t bytes) {
  if (bytes >= 1u << 30) {
    even_text_format(out, "%.1f GiB", (double)bytes / (double)(1u << 30));
  } else {
    even_text_format(out, "%" PRIu64 " MiB", bytes >> 20);
  }
}

static void add_signal(even_text *cause, const even_fault_facts *facts) {
  switch (facts->signal) {
    case SIGKILL:
      even_text_add(cause, "was killed by SIGKILL, sent from outside (kill -9, a job scheduler, a container's limit)");
      break;
    case SIGSEGV:
      even_text_add(cause, "crashed with SIGSEGV: native code touched memory that is not its own");
      break;
    case SIGBUS:
      even_text_add(cause, "crashed with SIGBUS: a mapped file or /dev/shm could not be read or is full");
      break;
    case SIGABRT:
      even_text_add(cause, "aborted itself with SIGABRT: native code found an error it could not go on with");
      break;
    case SIGILL:
      even_text_add(cause, "crashed with SIGILL: a library was built for instructions that this CPU lacks");
      break;
    case SIGFPE:
      even_text_add(cause, "crashed with SIGFPE: native code divided an integer by zero");
      break;
    case SIGTERM:
      even_text_add(cause, "was ended by SIGTERM (kill, a job scheduler, or the script itself)");
      break;
    case SIGINT:
      even_text_add(cause, "was interrupted by SIGINT");
      break;
    case SIGXCPU:
      even_text_add(cause, "was ended by SIGXCPU: its limit of CPU time (ulimit -t) is used up");
      break;
    default:
      even_text_format(cause, "was ended by signal %d (%s)", facts->signal, strsignal(facts->signal));
      break;
  }
}

static void add_location(even_text *cause, const even_traceback *traceback) {
  const char *name = traceback->file.start;
  size_t length = traceback->file.length;
  for (size_t i = 0; i < length; i++) {
    if (traceback->file.start[i] == '/') {
      name = traceback->file.start + i + 1;
    }
  }
  length -= (size_t)(name - traceback->file.start);
  even_text_format(cause, " (%.*s:%d", (int)length, name, traceback->line);
  if (traceback->function.start != NULL && traceback->function.start[0] != '<') {
    even_text_format(cause, ", in %.*s", (int)traceback->function.length, traceback->function.start);
  }
  even_text_add(cause, ")");
}

static bool ended_well(const even_fault_facts *facts) {
  return facts->lost == NULL && !facts->out_of_memory && !facts->stood_still && facts->hung == NULL &&
         facts->slow == NULL && facts->signal == 0 && facts->code == 0;
}

static bool find(const even_fault_facts *facts, even_traceback *out) {
  return even_traceback_find(facts->error, facts->error_length, out) ||
         even_traceback_find(facts->output, facts->output_length, out);
}

static void add_excerpt(even_text *excerpt, even_span_text block) {
  even_span_text part = block;
  if (part.start == NULL) {
    return;
  }
  part = even_traceback_last_lines(block.start, block.length, EXCERPT_LINES);
  if (part.length > EXCERPT_BYTES) {
    part.start += part.length - EXCERPT_BYTES;
    part.length = EXCERPT_BYTES;
  }
  even_text_append(excerpt, part.start, part.length);
}

/* Text from a program's output may hold anything; the cause is one line of printable text. */
static void make_printable(even_text *text) {
  for (size_t i = 0; i < text->length; i++) {
    if ((unsigned char)text->data[i] < ' ' || text->data[i] == 127) {
      text->data[i] = ' ';
    }
  }
}

static void add_exit(even_text *cause, const even_fault_facts *facts, const even_traceback *traceback, bool traced) {
  if (traced) {
    even_text_format(cause, "exited with code %d: %.*s", facts->code, (int)traceback->exception.length,
                     traceback->exception.start);
    if (traceback->file.start != NULL) {
      add_location(cause, traceback);
    }
    return;
  }
  even_text_format(cause, "exited with code %d", facts->code);
  even_span_text last = even_traceback_last_lines(facts->error, facts->error_length, 1);
  if (last.start != NULL) {
    even_text_format(cause, ": %.*s", last.length > 300 ? 300 : (int)last.length, last.start);
  }
}

static bool never_came(const even_fault_facts *facts) {
  return facts->leave == EVEN_LEAVE_BEFORE_JOINING || facts->leave == EVEN_LEAVE_BEFORE_OPENING;
}

/* Code 0, but the others were not done with it. */
static void add_leave(even_text *cause, const even_fault_facts *facts) {
  if (never_came(facts)) {
    const char *call = facts->leave == EVEN_LEAVE_BEFORE_JOINING ? "es.prepare" : "init_process_group";
    even_text_format(cause,
                     "ended with code 0 without %s, where the other ranks wait for it: let every rank call %s, or none",
                     call, call);
    return;
  }
  even_text_add(cause, "ended with code 0 ");
  if (facts->steps_known) {
    even_text_format(cause, "at step %" PRIu64 " ", facts->steps);
  }
  even_text_add(cause,
                "while the others were still training: let every rank make the same steps (no break, return or exit on "
                "one rank alone)");
}

even_status even_fault_explain(const even_fault_facts *facts, even_text *cause, even_text *excerpt) {
  even_traceback traceback;
  bool traced = find(facts, &traceback);
  even_text_clear(cause);
  even_text_clear(excerpt);
  even_text_append(excerpt, "", 0);
  even_text_format(cause, "rank %d (%s on %s", facts->rank, facts->device, facts->host);
  if (facts->pid > 0) { /* else of a host that was lost before this agent heard of it */
    even_text_format(cause, ", process %ld", facts->pid);
  }
  even_text_add(cause, ") ");
  if (ended_well(facts)) {
    if (facts->leave == EVEN_LEAVE_NONE) {
      even_text_add(cause, "ended well");
    } else {
      add_leave(cause, facts);
    }
    return even_text_status(cause);
  }
  if (facts->lost != NULL) {
    even_text_format(cause, "was lost with its host: %s", facts->lost);
  } else if (facts->out_of_memory) {
    even_text_add(cause, facts->signal != 0 ? "was killed by the kernel's out-of-memory killer"
                                            : "failed after the kernel's out-of-memory killer ended a process of it");
    if (facts->peak_memory_bytes > 0) {
      even_text_add(cause, " (it held up to ");
      add_memory(cause, facts->peak_memory_bytes);
      even_text_add(cause, "): use a smaller batch or model, fewer ranks, or a larger memory limit");
    }
  } else if (facts->slow != NULL) {
    even_text_format(cause, "held the others up, and was ended for it: %s", facts->slow);
  } else if (facts->hung != NULL) {
    even_text_format(cause, "hung, and was ended for it: %s (its stacks are in logs/hang-rank-%d.txt)", facts->hung,
                     facts->rank);
  } else if (facts->stood_still) {
    even_text_format(cause,
                     "was stopped (SIGSTOP, SIGTSTP), sent from outside, and stood still while others waited for it "
                     "(`kill -CONT %ld` would have let it go on)",
                     facts->pid);
  } else if (facts->stopped_by_agent) {
    even_text_add(cause, "was stopped because another rank failed or the job was ended");
  } else if (facts->signal != 0) {
    add_signal(cause, facts);
  } else {
    add_exit(cause, facts, &traceback, traced);
  }
  make_printable(cause);
  add_excerpt(excerpt, traced ? traceback.block
                              : (even_span_text){facts->error_length > 0 ? facts->error : NULL, facts->error_length});
  EVEN_TRY(even_text_status(cause));
  return even_text_status(excerpt);
}

/* How likely it is that this end began the others. */
typedef enum guilt {
  GUILT_NONE,
  GUILT_STOPPED,   /* the agent ended it */
  GUILT_PEER_LOST, /* it says itself that another rank went away */
  GUILT_UNCLEAR,   /* a connection of it broke, or somebody interrupted it */
  GUILT_SLOW,      /* it had failed already when the agent ended it, and was slow to end */
  GUILT_STOOD,     /* somebody stopped it, and the others could not wait */
  GUILT_FAILED,
  GUILT_SIGNALLED,
  GUILT_OUT_OF_MEMORY
} guilt;

static guilt guilt_of(const even_fault_facts *facts) {
  static const guilt by_blame[] = {
      [EVEN_BLAME_OWN] = GUILT_FAILED, [EVEN_BLAME_UNCLEAR] = GUILT_UNCLEAR, [EVEN_BLAME_PEER] = GUILT_PEER_LOST};
  even_traceback traceback;
  if (facts->out_of_memory) {
    return GUILT_OUT_OF_MEMORY;
  }
  if (facts->lost != NULL) {
    return GUILT_SIGNALLED;
  }
  if (facts->signal != 0 && !facts->stopped_by_agent) {
    return GUILT_SIGNALLED;
  }
  if (facts->stood_still || facts->hung != NULL || facts->slow != NULL) {
    return GUILT_STOOD;
  }
  if (ended_well(facts)) {
    return never_came(facts) ? GUILT_FAILED : GUILT_NONE;
  }
  bool traced = find(facts, &traceback);
  even_traceback_blame blame = traced ? even_traceback_blames(&traceback) : EVEN_BLAME_OWN;
  if (!facts->stopped_by_agent) {
    return by_blame[blame];
  }
  return traced && blame == EVEN_BLAME_OWN ? GUILT_SLOW : GUILT_STOPPED;
}

bool even_fault_is_secondary(const even_fault_facts *facts) {
  even_traceback traceback;
  return find(facts, &traceback) && even_traceback_blames(&traceback) != EVEN_BLAME_OWN;
}

bool even_fault_is_of_memory(const even_fault_facts *facts) {
  even_traceback traceback;
  if (facts->out_of_memory) {
    return true;
  }
  return facts->lost == NULL && !facts->stopped_by_agent && facts->signal == 0 && facts->code != 0 &&
         find(facts, &traceback) && even_traceback_blames(&traceback) == EVEN_BLAME_OWN &&
         even_traceback_is_of_memory(&traceback);
}

/* Whether the failure names the process that went away (src/comm does, torch's Gloo does not), and it is not this. */
static bool names_another(const even_fault_facts *failed, long pid) {
  static const char lead[] = "(process ";
  even_traceback traceback;
  char text[48];
  if (!find(failed, &traceback) ||
      memmem(traceback.exception.start, traceback.exception.length, lead, sizeof lead - 1) == NULL) {
    return false;
  }
  int length = snprintf(text, sizeof text, "%s%ld)", lead, pid);
  return memmem(traceback.exception.start, traceback.exception.length, text, (size_t)length) == NULL;
}

/* The rank that ended with code 0, of its own accord, and for lack of which `failed` failed; `count`: none. */
static size_t early_leaver(const even_fault_facts *ends, size_t count, const even_fault_facts *failed) {
  for (size_t i = 0; i < count; i++) {
    if (ended_well(&ends[i]) && !ends[i].stopped_by_agent && !names_another(failed, ends[i].pid)) {
      return i;
    }
  }
  return count;
}

size_t even_fault_culprit(const even_fault_facts *ends, size_t count) {
  size_t culprit = count;
  guilt most = GUILT_NONE;
  for (size_t i = 0; i < count; i++) {
    guilt its = guilt_of(&ends[i]);
    if (its > most) {
      most = its;
      culprit = i;
    }
  }
  if (most == GUILT_PEER_LOST) { /* nobody failed of his own */
    size_t leaver = early_leaver(ends, count, &ends[culprit]);
    culprit = leaver < count ? leaver : culprit;
  }
  return culprit;
}

even_place_blame even_fault_blames_place(const even_fault_facts *facts) {
  even_traceback traceback;
  if (facts->lost != NULL || facts->signal != 0 || facts->code == 0 || !find(facts, &traceback)) {
    return EVEN_PLACE_SPARED;
  }
  return even_traceback_blames_place(&traceback);
}

/* With which somebody asks a process to end, or a limit does. */
static bool asks_to_end(int signal) {
  return signal == SIGTERM || signal == SIGINT || signal == SIGHUP || signal == SIGQUIT || signal == SIGXCPU ||
         signal == SIGXFSZ || signal == SIGPIPE || signal == SIGUSR1 || signal == SIGUSR2 || signal == SIGALRM;
}

bool even_fault_is_of_place(const even_fault_facts *ends, size_t count, size_t culprit) {
  for (size_t i = 0; i < count; i++) {
    if (i != culprit && guilt_of(&ends[i]) >= GUILT_SLOW) {
      return false;
    }
  }
  if (culprit >= count) {
    return false;
  }
  const even_fault_facts *facts = &ends[culprit];
  if (facts->lost != NULL || facts->stood_still || facts->slow != NULL || even_fault_is_of_memory(facts)) {
    return false;
  }
  if (facts->hung != NULL) {
    return true;
  }
  return facts->stopped_by_agent ? false
         : facts->signal != 0    ? !asks_to_end(facts->signal)
                                 : even_fault_blames_place(facts) == EVEN_PLACE_BROKEN;
}
