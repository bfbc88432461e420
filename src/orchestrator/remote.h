/* The part of a job that runs on other hosts. Without any (job->hosts NULL) all of this does nothing. */
#ifndef EVEN_ORCHESTRATOR_REMOTE_H
#define EVEN_ORCHESTRATOR_REMOTE_H

#include "orchestrator/host_agent.h"
#include "orchestrator/job.h"

/* Which ranks are this host's, and how many hosts there are: first of all. */
void even_job_hosts_count(even_job *job);
/* For a job whose params, ranks and loop are there. */
even_status even_job_hosts_open(even_job *job) EVEN_MUST_USE;
void even_job_hosts_close(even_job *job);
/* Where the ranks of all hosts reach the first of them (MASTER_ADDR), and by which interface. */
void even_job_hosts_choose_address(even_job *job);
/* The same of a job without a host (NULL: with all), and with those that are about to come: where the first of them
 * reached this host, all can. Both are left as they are where nothing is known. */
void even_job_hosts_find_address(const even_job *job, const char *without, char address[EVEN_JOB_ADDRESS],
                                 char interface[EVEN_JOB_INTERFACE]);
/* Has each host start its ranks, which count as alive from then on; the agents of hosts that were lost are started
 * again first. */
even_status even_job_hosts_begin(even_job *job) EVEN_MUST_USE;
/* A signal for all ranks there; `ends`: it is to end them, else it is forwarded, without `groups`. */
void even_job_hosts_signal(even_job *job, int number, bool groups, bool ends);
/* Signs of life; about ten times a second, outside of the loop's calls. */
void even_job_hosts_tick(even_job *job);
/* A child was reaped: whether it was the shell of a host. */
bool even_job_hosts_reaped(even_job *job, pid_t pid);
/* Whether nothing of the attempt is left on any host; one that does not say so for a minute is given up. */
bool even_job_hosts_settled(even_job *job, uint64_t since_ns);
/* Whether the rank, or spare, is this agent's. */
bool even_job_is_here(const even_job *job, size_t rank);
/* Whether the place is kept for a host that may join: nobody has it yet. */
bool even_job_is_nobodys(const even_job *job, size_t rank);
/* Whether it is of that host. */
bool even_host_agent_has(const even_host_agent *agent, size_t rank);
/* What tells a host that its attempt goes on (ADOPT): which number it has, and how far the telemetry of its ranks was
 * taken here, by this agent or one that was killed, 0: not at all; the host sends again what comes behind
 * (remote_records.c). */
void even_remote_write_adopt(const even_job *job, const even_host_agent *agent, even_text *out);
/* Another agent was started there, whose ranks have new rings: nothing of them was taken. */
void even_remote_begin_places(const even_host_agent *agent);
/* How far the rings were read from which the records of one drain are, those of a rank together (RECORDS). */
void even_remote_write_places(const even_telemetry_reader *reader, const even_record *records, size_t count,
                              even_text *out);
/* Each of `places`, as ADOPT and RECORDS have them. What is none is left out. */
void even_remote_each_place(const json_t *places, void (*take)(void *context, int rank, uint64_t place), void *context);
/* Telemetry of a host's ranks (remote_records.c). EVEN_ERR_INPUT. */
even_status even_remote_take_records(even_job *job, const even_host_agent *agent,
                                     const even_message *message) EVEN_MUST_USE;
/* The number of a rank's host, 0: this one. */
size_t even_job_host_number(const even_job *job, size_t rank);
/* Whether the host of a rank has a part in the attempt, and can be told what to do. */
bool even_job_host_reached(const even_job *job, size_t rank);
/* Has the host of a rank start another process in its place. */
even_status even_job_host_fill(even_job *job, size_t rank) EVEN_MUST_USE;
/* The host of a rank, for those who read. */
const char *even_job_host_name(const even_job *job, size_t rank);
/* Asks its agent to end a rank of another host by SIGKILL; `standing`: only if it still stands. */
void even_job_host_end_rank(even_job *job, size_t rank, bool standing);

#endif
