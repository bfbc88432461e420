/* The list of a job's hosts, between two attempts: who leaves goes out of it, who joins comes into it. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/aside_hosts.h"
#include "orchestrator/bring.h"
#include "orchestrator/copies.h"
#include "orchestrator/elastic.h"
#include "orchestrator/legacy.h"
#include "os/clock.h"
#include "os/host.h"
#include "os/pipe.h"
#include "os/port.h"

#include <stdio.h>
#include <string.h>

enum { TURN_MS = 50 };

/* For an agent that was told the end to leave. */
static const uint64_t LEAVING_NS = 3000000000u;

bool even_elastic_stays(const even_host_agent *agent) {
  return !agent->leaves && !agent->fallen && !(agent->came && agent->lost);
}

size_t even_elastic_ranks(const even_job *job) {
  size_t ranks = even_move_ranks(job, 0);
  for (size_t i = 1; i < job->hosts->count; i++) {
    ranks += even_elastic_stays(&job->hosts->agents[i]) ? even_move_ranks(job, i) : 0;
  }
  return ranks;
}

/* ---- who leaves ---- */

/* Its shell ends with it; one that came by itself closes its connection, which is ours no more. The loop turns
 * meanwhile: commands, guests and ends of connections come, and find the list as it was. */
void even_elastic_say_goodbye(even_host_agent *agent) {
  uint64_t until = even_clock_ns() + LEAVING_NS;
  if (agent->link != NULL) {
    (void)!even_link_send(agent->link, EVEN_MESSAGE_END, NULL, NULL, 0);
    even_link_flush(agent->link, 1000);
    even_hosts_bury(agent->hosts, agent->link);
    agent->link = NULL;
  }
  even_pipe_close(agent->input);
  agent->input = -1;
  while (agent->shell.pid > 0 && !even_host_agent_shell_ended(agent) && even_clock_ns() < until) {
    if (even_loop_turn(&agent->hosts->loop, TURN_MS) != EVEN_OK) {
      even_error_clear();
      break;
    }
    even_hosts_tick(agent->hosts);
  }
  even_host_agent_drop(agent);
}

static void part(even_host_agent *agent) {
  even_elastic_say_goodbye(agent);
  even_device_list_free(&agent->devices);
  even_aside_host_close(agent);
  even_device_list_free(&agent->next.devices);
  agent->next.placed = false;
  agent->parted = true;
}

static void tell_left(const even_job *job, const even_host_agent *agent) {
  char words[256];
  size_t ranks = even_elastic_ranks(job) + even_guests_ranks(job->hosts);
  (void)snprintf(words, sizeof words,
                 "host %s is out of the job, and its agent has ended; the job goes on with %zu rank%s", agent->name,
                 ranks, ranks == 1 ? "" : "s");
  even_control_end(&job->hosts->elastic->control, agent->name, EVEN_OK, words, "");
}

/* Also those that are drained while others leave. */
static void part_all(even_job *job) {
  even_hosts *hosts = job->hosts;
  bool any = true;
  while (any) {
    any = false;
    for (size_t i = 1; i < hosts->count; i++) {
      even_host_agent *agent = &hosts->agents[i];
      if (agent->leaves && !agent->parted) {
        bool sought = even_elastic_look_for(hosts, agent);
        even_legacy_part(job->params->legacy, agent->name, sought); /* first: from here on it is gone */
        part(agent);
        tell_left(job, agent);
        any = true;
      }
    }
  }
}

/* ---- the new list: from here on the loop does not turn until it is the hosts' ---- */

/* What watches its shell knows where it lies. A witness that is just being started was told another number: it is
 * started once more, by and by. */
static void move(even_host_agent *from, even_host_agent *to, size_t index) {
  even_loop *loop = &from->hosts->loop;
  even_loop_watch before[2] = {from->watches[0], from->watches[1]};
  for (int i = 0; i < 2; i++) {
    even_loop_remove(loop, &from->watches[i]);
  }
  bool renumbered = from->index != index;
  *to = *from;
  to->index = index;
  for (int i = 0; i < 2; i++) {
    if (before[i].fd >= 0 && even_loop_add(loop, &to->watches[i], before[i].fd, before[i].ready, to) != EVEN_OK) {
      even_pipe_close(before[i].fd); /* its last words are not heard then */
      even_error_clear();
    }
  }
  if (renumbered && to->witness && to->link == NULL && !to->lost) {
    even_host_agent_drop(to);
    to->lost = true;
  }
}

static bool comes_in(const even_host_agent *guest) {
  return guest != NULL && guest->fits;
}

size_t even_elastic_room(const even_hosts *hosts, size_t count) {
  size_t room = count + (hosts->params.most_ranks > 0 ? (size_t)EVEN_GUESTS_MOST : 0);
  return room < EVEN_HOSTS_MOST ? room : EVEN_HOSTS_MOST > count ? EVEN_HOSTS_MOST : count;
}

static void leave_guests(even_hosts *hosts, even_host_agent *guest) {
  for (size_t i = 0; i < EVEN_GUESTS_MOST; i++) {
    if (hosts->elastic->guests[i] == guest) {
      hosts->elastic->guests[i] = NULL;
    }
  }
  even_free(guest);
}

even_host_agent *even_elastic_take_in(even_hosts *hosts, even_host_agent *guest) {
  if (hosts->count >= hosts->room) {
    return NULL;
  }
  even_host_agent *last = &hosts->agents[hosts->count - 1];
  even_host_agent *agent = last->witness ? last : last + 1;
  if (last->witness) {
    move(last, last + 1, hosts->count);
  }
  move(guest, agent, (size_t)(agent - hosts->agents));
  hosts->count++;
  hosts->elastic->grown = true;
  leave_guests(hosts, guest);
  return agent;
}

static size_t count_next(const even_hosts *hosts) {
  size_t count = 1;
  for (size_t i = 1; i < hosts->count; i++) {
    count += !hosts->agents[i].parted;
  }
  for (size_t i = 0; i < EVEN_GUESTS_MOST && count < EVEN_HOSTS_MOST; i++) {
    count += comes_in(hosts->elastic->guests[i]);
  }
  return count;
}

/* Those that stay: with ranks, or a witness. */
static size_t fill_staying(even_hosts *hosts, even_host_agent *list, size_t count, bool witness) {
  for (size_t i = 1; i < hosts->count; i++) {
    if (!hosts->agents[i].parted && hosts->agents[i].witness == witness) {
      move(&hosts->agents[i], &list[count], count);
      count++;
    }
  }
  return count;
}

/* A witness stays the last. */
static void fill(even_hosts *hosts, even_host_agent *list, size_t room) {
  list[0] = hosts->agents[0];
  size_t count = fill_staying(hosts, list, 1, false);
  bool witness = hosts->agents[hosts->count - 1].witness && !hosts->agents[hosts->count - 1].parted;
  room -= witness ? 1 : 0;
  for (size_t i = 0; i < EVEN_GUESTS_MOST && count < room; i++) {
    even_host_agent *guest = hosts->elastic->guests[i];
    if (comes_in(guest)) {
      move(guest, &list[count], count);
      even_elastic_is_back(hosts, &list[count]);
      count++;
      leave_guests(hosts, guest);
    }
  }
  (void)fill_staying(hosts, list, count, true);
}

even_status even_elastic_rearrange(even_job *job) {
  even_hosts *hosts = job->hosts;
  even_host_agent *list = NULL;
  for (size_t i = 1; i < hosts->count; i++) {
    even_bring_drop(&hosts->agents[i]); /* what was on its way ends with the parcels */
  }
  part_all(job);
  size_t count = count_next(hosts);
  size_t room = even_elastic_room(hosts, count);
  EVEN_TRY(EVEN_NEW_ARRAY(&list, room));
  fill(hosts, list, count);
  even_free(hosts->agents);
  hosts->agents = list;
  hosts->count = count;
  hosts->room = room;
  hosts->elastic->grown = false;
  hosts->adopts = false; /* ranks are numbered anew */
  even_move_done(hosts);
  job->parcels = NULL;
  even_copies_renew(hosts->copies); /* begun anew, with the hosts that there are now */
  return even_hosts_open_parcels(hosts);
}

bool even_elastic_port(even_job *job) {
  if (job->hosts == NULL || job->hosts->elastic->move.port == 0) {
    return false;
  }
  even_move *move = &job->hosts->elastic->move;
  bool its = move->attempt == job->attempt && move->era == job->era &&
             even_port_pass(move->port, &move->port_held, &job->port_held);
  if (its) {
    job->master_port = move->port;
  }
  even_port_let_go(&move->port_held);
  move->port = 0;
  return its;
}

bool even_hosts_changed(const even_hosts *hosts) {
  return hosts != NULL && hosts->elastic->past.kept;
}

/* That of an interface that is up; a host without any is reached by itself alone. */
void even_hosts_where(const even_hosts *hosts, char *out, size_t bytes) {
  even_interface_list list = {NULL, 0};
  char address[64] = "127.0.0.1";
  if (even_interface_list_read(&list) != EVEN_OK) {
    even_error_clear();
  }
  for (size_t i = list.count; i-- > 0;) {
    const even_interface *interface = &list.items[i];
    size_t length = strcspn(interface->addresses, ", ");
    if (interface->up && !interface->loopback && length > 0 && length < sizeof address &&
        memchr(interface->addresses, ':', length) == NULL) {
      (void)snprintf(address, sizeof address, "%.*s", (int)length, interface->addresses);
    }
  }
  even_interface_list_free(&list);
  (void)snprintf(out, bytes, "%s:%d", hosts->params.address == NULL ? address : hosts->params.address, hosts->port);
}
