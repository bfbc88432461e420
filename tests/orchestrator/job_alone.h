/* A job without agents or an attempt: its ranks are what the test says of them, and their generations are real. */
#ifndef EVEN_TESTS_JOB_ALONE_H
#define EVEN_TESTS_JOB_ALONE_H

#include "orchestrator/boards.h"

/* Of a job whose params, ranks, snapshots, count and hosts are set: no files and pipes for its ranks, their progress
 * (in this segment, -1: none of its own), and the first generation, in which every one of them can go on; *view looks
 * at it as a rank does. */
even_status job_alone_begin(even_job *job, int telemetry_fd, even_generation **view) EVEN_MUST_USE;

#endif
