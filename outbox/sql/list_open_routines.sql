-- Does:  List which of the given routines PUBLIC may run.
-- Takes: routines, as name(types)
-- Gives: routine
-- Index: none
SELECT w.routine FROM unnest(%(routines)s::text[]) AS w (routine)
 WHERE has_function_privilege('public', to_regprocedure(w.routine)::oid, 'EXECUTE')
