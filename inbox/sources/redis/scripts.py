"""What has to happen in one step on the server."""

from typing import Final

RETURNED: Final = "returned"
"""The group member to which returned entries are assigned."""

TAKE: Final = """
-- Reads for a member, unless another one that is alive holds entries or is older.
-- A member is alive while its process is subscribed to its channel, and it was at work
-- within its lease. First come the entries of those that aren't, in order.
local key, group, me, channel, prefix = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease, limit = tonumber(ARGV[5]), tonumber(ARGV[6])
local function is_present(name)
  return redis.call('PUBSUB', 'NUMSUB', name)[2] > 0
end
local function read(from, count)
  return redis.pcall('XREADGROUP', 'GROUP', group, me, 'COUNT', count,
    'STREAMS', key, from)
end

-- Finds nothing, but is a sign of life.
local seen = read('18446744073709551615-0', 1)
if seen and seen.err then return seen end
if not is_present(channel) then return {channel} end
local others, left, mine, older = 0, 0, 0, nil
for _, member in ipairs(redis.call('XINFO', 'CONSUMERS', key, group)) do
  local name, pending, idle = member[2], member[4], member[6]
  local its_channel = string.gsub(name, '/%d+$', '')
  local has_channel = string.sub(name, 1, #prefix) == prefix
  local is_gone = its_channel == channel or name == 'returned'
    or has_channel and not is_present(its_channel)
  if its_channel == channel then mine = mine + pending end
  if name ~= me then
    if is_gone or idle >= lease then
      left = left + pending
      if is_gone and has_channel and pending == 0 then
        redis.call('XGROUP', 'DELCONSUMER', key, group, name)
      end
    elseif pending > 0 then
      return {name}
    elseif has_channel and its_channel < channel then
      older = name
    else
      others = others + 1
    end
  end
end
-- The older one waits until nobody else holds an entry.
if older and mine == 0 then return {older} end

local taken, start = {}, '-'
while left > 0 and #taken < limit do
  local page = redis.call('XPENDING', key, group, start, '+', 1000)
  for _, entry in ipairs(page) do
    if entry[2] ~= me and #taken < limit then taken[#taken + 1] = entry end
  end
  if #page < 1000 then break end
  start = '(' .. page[#page][1]
end
local entries = {}
for _, entry in ipairs(taken) do
  local id, name, times = entry[1], entry[2], entry[4]
  local claimed = redis.call('XCLAIM', key, group, me, 0, id)[1]
  if claimed then
    entries[#entries + 1] = {id, claimed[2], times, name == 'returned' and 1 or 0}
  else -- it was trimmed
    redis.call('XACK', key, group, id)
  end
end

local last = ''
if #taken < limit then
  local new = read('>', limit - #taken)
  if new and new.err then return new end
  new = new and new[1][2] or {}
  for _, entry in ipairs(new) do
    entries[#entries + 1] = {entry[1], entry[2], 0, 0}
    last = entry[1]
  end
  if #taken + #new == limit then
    last = ''
  elseif last == '' then
    for _, found in ipairs(redis.call('XINFO', 'GROUPS', key)) do
      if found[2] == group then last = found[8] end
    end
  end
end
return {'', others, entries, last}
"""

END_MEMBERSHIP: Final = """
local group, member = ARGV[1], ARGV[2]
local pending = redis.pcall('XPENDING', KEYS[1], group, '-', '+', 1, member)
if pending.err then return pending end
if #pending > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, member)
return 1
"""
